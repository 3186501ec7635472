"""Generate text for a list of prompts."""

import sys

from pagemill import LLM, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    llm = LLM(model=model)
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
