"""A whole answer, put together from the pieces that workers stream."""

from vllm.outputs import CompletionOutput, RequestOutput


class GatheredAnswer:
    """All choices of a request. Each piece costs as much as it is long, however many choices there
    are: vLLM merges pieces, but looks through all choices of an output for each, so each choice is
    kept in an output of its own.
    """

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None
        self._choices: dict[int, RequestOutput] = {}

    def add(self, piece: RequestOutput) -> RequestOutput | None:
        """Add a piece, which is taken apart.

        Returns:
            The answer with its choices in order, once a piece has said that it is the last.
        """
        outputs, piece.outputs = piece.outputs, []
        if self._whole is None:
            self._whole = piece
        else:
            self._whole.add(piece, aggregate=True)
            self._whole.metrics = piece.metrics
        for output in outputs:
            choice = _only(output)
            known = self._choices.setdefault(output.index, choice)
            if known is not choice:
                known.add(choice, aggregate=True)
        if not self._whole.finished:
            return None
        self._whole.outputs = [choice.outputs[0] for _, choice in sorted(self._choices.items())]
        return self._whole


def _only(output: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=None,
        prompt_logprobs=None,
        outputs=[output],
        finished=False,
    )
