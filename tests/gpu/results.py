"""What the parts of a run print, one JSON line each."""

import msgspec


class Kernels(msgspec.Struct, frozen=True):
    """vLLM's compiled operators beside PyTorch.

    Attributes:
        errors: relative error of each operator, or why it failed.
        flags: of vLLM, which replace operators that are wrong here.
        versions: of Python and of the driver.
    """

    card: str
    versions: dict[str, str]
    errors: dict[str, float | str]
    flags: list[str]


class Answers(msgspec.Struct, frozen=True):
    """The same questions to mmrouter and to plain vLLM, one at a time.

    Attributes:
        same_tokens: questions with the same tokens from both.
        predicted_is_realised: questions whose cached tokens the router predicted exactly.
        with_hits: questions of which some tokens were cached.
        differences: a sentence for each question that differs, at most twelve.
    """

    questions: int
    same_tokens: int
    predicted_is_realised: int
    with_hits: int
    differences: list[str]


class Cost(msgspec.Struct, frozen=True):
    """What the processes of a server other than its engine used.

    Attributes:
        user_ms, system_ms: CPU time, in the kernel's ticks of 10 ms.
        faults: pages that the kernel had to give without reading a disk, of 4 KiB.
    """

    user_ms: float
    system_ms: float
    faults: float


class FirstToken(msgspec.Struct, frozen=True):
    """Time to the first token of one contender.

    Attributes:
        new_ms: median over new pictures, which all travelled as the contender says.
        repeated_ms: median over the same requests once more.
        samples: requests of each kind.
        ways: how the new pictures travelled, counted.
        new_cost: what a new picture cost the processes beside the engine, the mean.
    """

    new_ms: float | None
    repeated_ms: float | None
    samples: int
    ways: dict[str, int]
    new_cost: Cost | None = None


class Encodings(msgspec.Struct, frozen=True):
    """Pictures that left the encoder cache for the host's memory, asked about again.

    Attributes:
        same_tokens: pictures with plain vLLM's tokens the second time.
        log_lines: of vLLM's connector, by what they say.
    """

    pictures: int
    same_tokens: int
    log_lines: dict[str, int]


class Fleet(msgspec.Struct, frozen=True):
    """A frontend for each way, two workers and a plain vLLM, on one GPU.

    Attributes:
        ready_s: seconds until all of them served.
        not_engines_with_cuda: processes other than engines that opened CUDA's driver.
        failed: steps that ended in an error.
    """

    dtype: str
    ready_s: float
    answers: Answers | None
    first_tokens: dict[str, FirstToken]
    encodings: Encodings | None
    not_engines_with_cuda: list[str]
    failed: dict[str, str]


class Copies(msgspec.Struct, frozen=True):
    """Copies from shared memory to the device.

    Attributes:
        gb_s: rate by size and by way; None where a way is not possible.
        register_ms: time to register the arena with CUDA, by kind of mapping.
        detached: kinds of mapping that no longer show the owner's writes once registered.
    """

    gb_s: dict[str, dict[str, float | None]]
    register_ms: dict[str, float]
    detached: list[str]


class Reads(msgspec.Struct, frozen=True):
    """NIXL READs from another process.

    Attributes:
        gb_s: rate by kinds of memory and by size.
        failed: kinds of memory that could not be read, with the reason.
    """

    gb_s: dict[str, float]
    failed: dict[str, str]


Result = Kernels | Fleet | Copies | Reads
