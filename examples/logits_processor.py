"""Change the logits of a request with a function: a pure function of (generated ids, logits)."""

import sys

from pagemill import LLM, SamplingParams


def no_digits(llm):
    """Return a processor that makes every token with a digit in it impossible."""
    tokenizer = llm.get_tokenizer()
    banned = [
        i for i in range(tokenizer.vocab_size) if any(map(str.isdigit, tokenizer.token_text(i)))
    ]

    def process(output_ids, logits):
        logits[banned] = float("-inf")
        return logits

    return process


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    llm = LLM(model=model)
    params = SamplingParams(temperature=0.0, max_tokens=16, logits_processors=[no_digits(llm)])
    print(llm.generate("One, two, three. In figures: ", params)[0].outputs[0].text)
