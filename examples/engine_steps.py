"""Drive the engine step by step: add requests at any time, abort one, watch the others go on."""

import sys

from pagemill import EngineArgs, LLMEngine, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    engine = LLMEngine.from_engine_args(EngineArgs(model=model))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    engine.add_request("first", "One, two, three,", params)
    engine.add_request("second", "Monday, Tuesday,", params)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(f"{output.request_id}: {output.outputs[0].text!r}")
        steps += 1
        if steps == 4:
            engine.abort_request("first")
            engine.add_request("third", "January, February,", params)
