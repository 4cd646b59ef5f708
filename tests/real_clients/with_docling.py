"""docling: pictures of pages, read by a model over the API."""

import base64
from importlib.metadata import version
from io import BytesIO

from docling.datamodel.base_models import DocumentStream, InputFormat
from docling.datamodel.pipeline_options import VlmPipelineOptions
from docling.datamodel.pipeline_options_vlm_model import ApiVlmOptions, ResponseFormat
from docling.document_converter import DocumentConverter, ImageFormatOption
from docling.pipeline.vlm_pipeline import VlmPipeline

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()


@case
def page(at: Endpoint) -> object:
    reading = ApiVlmOptions(
        url=f"{at.url}/v1/chat/completions",
        params={"model": at.model, "max_tokens": 8},
        headers={"Authorization": f"Bearer {at.key}"},
        prompt="Convert this page to Markdown.",
        response_format=ResponseFormat.MARKDOWN,
    )
    options = VlmPipelineOptions(vlm_options=reading, enable_remote_services=True)
    with_it = ImageFormatOption(pipeline_cls=VlmPipeline, pipeline_options=options)
    converter = DocumentConverter(format_options={InputFormat.IMAGE: with_it})
    data = base64.b64decode(at.picture.partition(",")[2])
    done = converter.convert(DocumentStream(name="page.png", stream=BytesIO(data)))
    return [done.status, [each.error_message for each in done.errors], len(done.pages)]


if __name__ == "__main__":
    main(case, {"docling-slim": version("docling-slim")})
