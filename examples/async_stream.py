"""Stream two requests at once from the asynchronous engine."""

import asyncio
import sys

from pagemill import AsyncEngineArgs, AsyncLLMEngine, RequestOutputKind, SamplingParams


async def stream(engine, request_id, prompt):
    """Print each piece of text as it comes."""
    params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, params, request_id=request_id):
        print(request_id, repr(output.outputs[0].text), flush=True)


async def main(model):
    """Run both streams side by side."""
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model))
    try:
        await asyncio.gather(
            stream(engine, "a", "One, two, three,"), stream(engine, "b", "Monday, Tuesday,")
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"))
