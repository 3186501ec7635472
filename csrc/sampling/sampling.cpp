#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "sampling/sampling_kernels.h"
#include "sampling/truncation.h"

namespace pagemill {
namespace {

using namespace sampling_detail;

using KernelsFn = const Kernels* (*)();
constexpr Table<KernelsFn> kTable = {{portable_kernels, PAGEMILL_IF_AVX2(avx2_kernels),
                                      PAGEMILL_IF_AVX512(avx512_kernels), nullptr, nullptr}};

constexpr int64_t kMostVocab = int64_t{1} << 31;
constexpr int64_t kSerial = 1 << 15;  // numbers; fewer are not worth waking other threads for

Room& own_room() {
  thread_local Room room;
  return room;
}

size_t blocks_of(int64_t vocab) { return static_cast<size_t>((vocab + kBlock - 1) / kBlock); }

void check_matrix(const char* op, uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab) {
  check(vocab >= 1 && vocab < kMostVocab && rows >= 0, op, "sizes",
        "must be rows >= 0 and a vocabulary of 1 to 2^31 - 1");
  check(rows <= 1 || stride >= vocab, op, "stride", "must be at least the vocabulary");
  check(rows == 0 || logits != 0, op, "logits", "must not be null");
}

template <class Body>
void for_rows(int64_t rows, int64_t vocab, const Body& body) {
  const int64_t grain = rows * vocab < kSerial ? std::max<int64_t>(rows, 1) : 1;
  parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

float highest_of(const std::vector<float>& maxima) {
  return *std::max_element(maxima.begin(), maxima.end());
}

// J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011: 53 bits of Philox4x32-10
// with the seed as key, as a number in [0, 1).
double uniform(uint64_t seed, uint64_t index, uint64_t position) {
  constexpr uint64_t kLow = 0xffffffffu, kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  uint64_t c[4] = {position & kLow, position >> 32, index & kLow, 0};
  uint64_t k0 = seed & kLow, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kFirst * c[0], p1 = kSecond * c[2];
    c[0] = (p1 >> 32) ^ c[1] ^ k0;
    c[1] = p1 & kLow;
    c[2] = (p0 >> 32) ^ c[3] ^ k1;
    c[3] = p0 & kLow;
    k0 = (k0 + 0x9E3779B9u) & kLow;
    k1 = (k1 + 0xBB67AE85u) & kLow;
  }
  return static_cast<double>(((c[0] << 32) | c[1]) >> 11) * 0x1p-53;
}

// The first kept token, by rising id, whose cumulative weight exceeds u times the total.
int64_t invert(const Room& room, int64_t vocab, const Cut& cut, double total, double u) {
  const double target = u * total;
  double before = 0.0;
  int64_t block = -1, candidate = -1;
  for (size_t i = 0; i < room.sums.size(); ++i) {
    if (room.sums[i] <= 0.0) continue;
    // Rounding may bring the target up to the total: then the last block with any weight is meant.
    if (block >= 0) before += room.sums[static_cast<size_t>(block)];
    block = static_cast<int64_t>(i);
    if (before + room.sums[i] > target) break;
  }
  const int64_t end = std::min(vocab, (block + 1) * kBlock);
  for (int64_t id = block * kBlock; id < end; ++id) {
    const float w = room.weights[static_cast<size_t>(id)];
    if (!(w > 0.0f && (w > cut.level || (w == cut.level && id <= cut.last)))) continue;
    before += static_cast<double>(w);
    candidate = id;
    if (before > target) break;
  }
  return candidate;
}

}  // namespace

void best_rows(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t best,
               uintptr_t highest) {
  check_matrix("best_rows", logits, stride, rows, vocab);
  const Kernels& kernels = *pick(kTable)();
  for_rows(rows, vocab, [&](int64_t row) {
    const float* x = reinterpret_cast<const float*>(logits) + row * stride;
    Room& room = own_room();
    room.maxima.resize(blocks_of(vocab));
    const bool broken = kernels.block_maxima(x, vocab, room.maxima.data());
    const float most = highest_of(room.maxima);
    int64_t id = 0;
    if (!broken) {
      const auto block = std::find(room.maxima.begin(), room.maxima.end(), most);
      id = (block - room.maxima.begin()) * kBlock;
      while (x[id] != most) ++id;
    }
    reinterpret_cast<int64_t*>(best)[row] = id;
    reinterpret_cast<float*>(highest)[row] =
        broken ? std::numeric_limits<float>::quiet_NaN() : most;
  });
}

void draw_rows(uintptr_t logits, int64_t stride, int64_t vocab, int64_t count, uintptr_t highest,
               uintptr_t numbers, uintptr_t wholes, uintptr_t tokens) {
  constexpr const char* kOp = "draw_rows";
  check_matrix(kOp, logits, stride, count, vocab);
  const double(*real)[3] = reinterpret_cast<const double(*)[3]>(numbers);
  const int64_t(*whole)[6] = reinterpret_cast<const int64_t(*)[6]>(wholes);
  const float* tops = reinterpret_cast<const float*>(highest);
  std::vector<int64_t> starts(static_cast<size_t>(count) + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    check(whole[i][0] >= 0 && whole[i][5] >= 0, kOp, "wholes", "must hold rows and draws >= 0");
    check(real[i][0] > 0.0 && real[i][1] > 0.0, kOp, "numbers",
          "must hold a positive temperature and top_p");
    check(std::isfinite(tops[i]), kOp, "highest", "must be finite");
    starts[static_cast<size_t>(i) + 1] = starts[static_cast<size_t>(i)] + whole[i][5];
  }
  const Kernels& kernels = *pick(kTable)();
  for_rows(count, vocab, [&](int64_t i) {
    const float* x = reinterpret_cast<const float*>(logits) + whole[i][0] * stride;
    Room& room = own_room();
    room.weights.resize(static_cast<size_t>(vocab));
    room.maxima.resize(blocks_of(vocab));
    room.sums.resize(blocks_of(vocab));
    constexpr double kMost = std::numeric_limits<float>::max();
    const float divisor = static_cast<float>(std::min(real[i][0], kMost));
    kernels.weigh(x, vocab, tops[i], divisor, room.weights.data());
    kernels.block_maxima(room.weights.data(), vocab, room.maxima.data());
    kernels.block_sums(room.weights.data(), vocab, -1.0f, vocab, room.sums.data());
    double total = 0.0;
    for (double sum : room.sums) total += sum;
    const Spec spec{real[i][0], real[i][1], real[i][2], whole[i][1]};
    const Cut cut = truncate(kernels, room, vocab, total, spec);
    if (cut.level >= 0.0f) {
      kernels.block_sums(room.weights.data(), vocab, cut.level, cut.last, room.sums.data());
      total = 0.0;
      for (double sum : room.sums) total += sum;
    }
    int64_t* out = reinterpret_cast<int64_t*>(tokens) + starts[static_cast<size_t>(i)];
    for (int64_t draw = 0; draw < whole[i][5]; ++draw) {
      const double u = uniform(static_cast<uint64_t>(whole[i][2]),
                               static_cast<uint64_t>(whole[i][3] + draw),
                               static_cast<uint64_t>(whole[i][4]));
      out[draw] = invert(room, vocab, cut, total, u);
    }
  });
}

void score_rows(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t chosen,
                uintptr_t starts, uintptr_t counts, uintptr_t normalizers, uintptr_t ranks,
                uintptr_t top_ids) {
  constexpr const char* kOp = "score_rows";
  check_matrix(kOp, logits, stride, rows, vocab);
  const int64_t* first = reinterpret_cast<const int64_t*>(starts);
  const int64_t* ids = reinterpret_cast<const int64_t*>(chosen);
  const int64_t* many = reinterpret_cast<const int64_t*>(counts);
  std::vector<int64_t> tops(static_cast<size_t>(rows) + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    check(many[row] >= 0 && many[row] <= vocab, kOp, "counts", "must be 0 to the vocabulary");
    for (int64_t i = first[row]; i < first[row + 1]; ++i)
      check(ids[i] >= 0 && ids[i] < vocab, kOp, "chosen", "must be ids of the vocabulary");
    tops[static_cast<size_t>(row) + 1] = tops[static_cast<size_t>(row)] + many[row];
  }
  const Kernels& kernels = *pick(kTable)();
  for_rows(rows, vocab, [&](int64_t row) {
    const float* x = reinterpret_cast<const float*>(logits) + row * stride;
    Room& room = own_room();
    room.maxima.resize(blocks_of(vocab));
    kernels.block_maxima(x, vocab, room.maxima.data());
    const float highest = highest_of(room.maxima);
    reinterpret_cast<double*>(normalizers)[row] =
        static_cast<double>(highest) + std::log(kernels.exp_sum(x, vocab, highest));
    for (int64_t i = first[row]; i < first[row + 1]; ++i) {
      const float value = x[ids[i]];
      reinterpret_cast<int64_t*>(ranks)[i] = 1 + kernels.count_over(x, vocab, value) +
                                             std::count(x, x + ids[i], value);
    }
    if (many[row] > 0)
      largest(x, vocab, room.maxima, many[row], room,
              reinterpret_cast<int64_t*>(top_ids) + tops[static_cast<size_t>(row)]);
  });
}

void penalize_row(uintptr_t logits, int64_t vocab, uintptr_t tokens, int64_t count, int64_t prompt,
                  float repetition, float frequency, float presence) {
  constexpr const char* kOp = "penalize_row";
  check(vocab >= 1 && vocab < kMostVocab, kOp, "vocab", "must be 1 to 2^31 - 1");
  check(prompt >= 0 && count >= prompt, kOp, "prompt", "must be 0 to count");
  const int32_t* ids = reinterpret_cast<const int32_t*>(tokens);
  for (int64_t i = 0; i < count; ++i)
    check(ids[i] >= 0 && ids[i] < vocab, kOp, "tokens", "must be ids of the vocabulary");
  float* x = reinterpret_cast<float*>(logits);
  thread_local std::vector<int32_t> seen;  // zeros between calls
  if (static_cast<int64_t>(seen.size()) < vocab) seen.resize(static_cast<size_t>(vocab), 0);
  if (repetition != 1.0f) {
    constexpr float kLargest = std::numeric_limits<float>::max() / 4;
    for (int64_t i = 0; i < count; ++i) {
      if (seen[static_cast<size_t>(ids[i])]++ != 0) continue;
      float& logit = x[ids[i]];
      if (!std::isfinite(logit)) continue;
      const float changed = logit > 0 ? logit / repetition : logit * repetition;
      logit = std::min(std::max(changed, -kLargest), kLargest);
    }
    for (int64_t i = 0; i < count; ++i) seen[static_cast<size_t>(ids[i])] = 0;
  }
  if (frequency == 0.0f && presence == 0.0f) return;
  for (int64_t i = prompt; i < count; ++i) ++seen[static_cast<size_t>(ids[i])];
  for (int64_t i = prompt; i < count; ++i) {
    int32_t& times = seen[static_cast<size_t>(ids[i])];
    if (times == 0) continue;
    float& logit = x[ids[i]];
    logit -= frequency * static_cast<float>(times);
    logit -= presence;
    times = 0;
  }
}

}  // namespace pagemill
