"""Talk to a chat model from Python."""

import sys

from pagemill import LLM, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    llm = LLM(model=model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=24))[0]
    print(output.outputs[0].text)
