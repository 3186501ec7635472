"""Draw several seeded samples of one prompt, with the logprobs of each token."""

import sys

from pagemill import LLM, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    llm = LLM(model=model)
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, logprobs=2)
    for sample in llm.generate("The weather today is", params)[0].outputs:
        print(f"sample {sample.index}, seed {sample.seed}: {sample.text!r}")
        for token_id, candidates in zip(sample.token_ids, sample.logprobs, strict=True):
            chosen = candidates[token_id]
            print(f"   {chosen.decoded_token!r:14} {chosen.logprob:8.3f}  rank {chosen.rank}")
