"""The HTTP server: OpenAI's routes over one `AsyncLLMEngine`. No torch in this process.

`app` holds the route table and builds the ASGI application; `launch` runs it beside an engine process.
A request is read by `protocol` (every field known, checked or refused by name), becomes `SamplingParams`
and token ids, and its outputs become JSON (`completions`, `chat`) or server-sent events (`streaming`).
Called by `pagemill serve`.
"""
