#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "checks.h"

namespace driver {
namespace {

struct Shape {
  int64_t heads, kv_heads, head_dim, window;
  float softcap;
  bool sinks;
};

constexpr Shape kShapes[] = {{6, 2, 16, 0, 0.0f, false},
                             {4, 4, 20, 30, 0.0f, true},
                             {5, 1, 7, 0, 2.0f, false},
                             {3, 1, 64, 300, 3.0f, true}};
// One within a segment, one across two, one alone in its block.
constexpr int64_t kLengths[] = {45, 290, 1};

struct Sequence {
  int64_t length;
  Array q, k, v;  // [length, heads, head_dim]

  Sequence(const Shape& s, int dtype, int64_t count, uint64_t seed)
      : length(count),
        q(dtype, count * s.heads * s.head_dim, seed),
        k(dtype, count * s.kv_heads * s.head_dim, seed + 1),
        v(dtype, count * s.kv_heads * s.head_dim, seed + 2) {}
};

// Numbers a token and head of the cache: in int8, codes and a scale.
int64_t token_width(int cache_dtype, int64_t head_dim) {
  return cache_dtype == 2 ? (head_dim + 3) / 4 * 4 + 4 : head_dim;
}

std::vector<float> sink_scores(const Shape& shape) {
  std::vector<float> sinks;
  for (int64_t i = 0; i < shape.heads; ++i) sinks.push_back(0.5f * static_cast<float>(i) - 1.0f);
  return sinks;
}

// A paged cache, and sequences that take steps in it.
class Cache {
 public:
  Cache(const Shape& shape, int q_dtype, int cache_dtype, int64_t block_size,
        const std::vector<const Sequence*>& seqs)
      : shape_(shape), q_dtype_(q_dtype), block_size_(block_size), seqs_(seqs),
        done_(seqs.size(), 0), sinks_(sink_scores(shape)), num_blocks_(count_blocks()),
        k_pool_(cache_dtype, num_blocks_ * shape.kv_heads * block_size * token_width(cache_dtype, shape.head_dim), 90),
        v_pool_(cache_dtype, num_blocks_ * shape.kv_heads * block_size * token_width(cache_dtype, shape.head_dim), 91) {
    for (const Sequence* seq : seqs) out_.emplace_back(q_dtype, seq->q.count());
  }

  // Do the next counts[i] tokens of each sequence.
  void step(const std::vector<int64_t>& counts) {
    std::vector<int64_t> starts{0}, computed, slots, tables;
    for (size_t i = 0; i < seqs_.size(); ++i) {
      starts.push_back(starts.back() + counts[i]);
      computed.push_back(done_[i]);
      for (int64_t b = 0; b < width_; ++b) tables.push_back(block(i, b));
      for (int64_t p = done_[i]; p < done_[i] + counts[i]; ++p)
        slots.push_back(block(i, p / block_size_) * block_size_ + p % block_size_);
    }
    const Array q = gather(counts, shape_.heads, &Sequence::q);
    const Array k = gather(counts, shape_.kv_heads, &Sequence::k);
    const Array v = gather(counts, shape_.kv_heads, &Sequence::v);
    Array out(q_dtype_, q.count());
    pagemill::AttentionPlan plan(starts, computed, reinterpret_cast<uintptr_t>(tables.data()),
                                 width_, reinterpret_cast<uintptr_t>(slots.data()), block_size_);
    const int64_t needed = run(plan, q, k, v, out, nullptr, 0);
    void* scratch = nullptr;
    if (needed > 0) {
      require(posix_memalign(&scratch, 64, static_cast<size_t>(needed)) == 0, "no scratch memory");
      require(run(plan, q, k, v, out, scratch, needed) == 0, "attention asks for memory twice");
      std::free(scratch);
    }
    const int64_t row = shape_.heads * shape_.head_dim;
    for (size_t i = 0; i < seqs_.size(); ++i) {
      std::memcpy(reinterpret_cast<void*>(out_[i].at(done_[i] * row)),
                  out.data() + starts[i] * row * out.item(),
                  static_cast<size_t>(counts[i] * row * out.item()));
      done_[i] += counts[i];
    }
  }

  const Array& rows(size_t seq) const { return out_[seq]; }
  int64_t left(size_t seq) const { return seqs_[seq]->length - done_[seq]; }

 private:
  int64_t count_blocks() {
    for (const Sequence* seq : seqs_)
      width_ = std::max(width_, (seq->length + block_size_ - 1) / block_size_);
    return width_ * static_cast<int64_t>(seqs_.size());
  }

  // Blocks of all sequences, from the last to the first, by turns.
  int64_t block(size_t seq, int64_t index) const {
    return num_blocks_ - 1 - (index * static_cast<int64_t>(seqs_.size()) + static_cast<int64_t>(seq));
  }

  Array gather(const std::vector<int64_t>& counts, int64_t heads, const Array Sequence::*what) const {
    const int64_t row = heads * shape_.head_dim;
    int64_t total = 0;
    for (const int64_t count : counts) total += count;
    Array all(q_dtype_, total * row);
    int64_t at = 0;
    for (size_t i = 0; i < seqs_.size(); ++i) {
      std::memcpy(reinterpret_cast<void*>(all.at(at * row)),
                  (seqs_[i]->*what).data() + done_[i] * row * all.item(),
                  static_cast<size_t>(counts[i] * row * all.item()));
      at += counts[i];
    }
    return all;
  }

  int64_t run(pagemill::AttentionPlan& plan, const Array& q, const Array& k, const Array& v,
              Array& out, void* scratch, int64_t scratch_bytes) {
    const Shape& s = shape_;
    const int64_t d = s.head_dim;
    return pagemill::attention(
        plan, s.heads, s.kv_heads, d, 1.0f / std::sqrt(static_cast<float>(d)), s.softcap, s.window,
        q_dtype_, k_pool_.dtype(), q.address(), s.heads * d, d, k.address(), s.kv_heads * d, d,
        v.address(), s.kv_heads * d, d, k_pool_.address(), v_pool_.address(), num_blocks_,
        s.sinks ? reinterpret_cast<uintptr_t>(sinks_.data()) : 0, out.address(),
        reinterpret_cast<uintptr_t>(scratch), scratch_bytes);
  }

  Shape shape_;
  int q_dtype_;
  int64_t block_size_, width_ = 0;
  std::vector<const Sequence*> seqs_;
  std::vector<int64_t> done_;
  std::vector<float> sinks_;
  int64_t num_blocks_;
  Array k_pool_, v_pool_;
  std::vector<Array> out_;
};

// Attention in float64 of one query, keys and values as the cache rounds them.
void attend(const Shape& s, const Sequence& seq, int cache_dtype, int64_t query, int64_t head,
            std::vector<double>& values) {
  const int64_t d = s.head_dim, kv = head / (s.heads / s.kv_heads);
  const auto kept = [&](const Array& a, int64_t i) {
    const float x = static_cast<float>(a.get(i));
    return static_cast<double>(cache_dtype != 1 ? x : pagemill::to_float(pagemill::to_bf16(x)));
  };
  const double sink = s.sinks ? sink_scores(s)[static_cast<size_t>(head)] : -INFINITY;
  const int64_t first = s.window > 0 ? std::max<int64_t>(0, query + 1 - s.window) : 0;
  std::vector<double> scores;
  double highest = sink;
  for (int64_t key = first; key <= query; ++key) {
    double score = 0;
    for (int64_t i = 0; i < d; ++i)
      score += seq.q.get((query * s.heads + head) * d + i) *
               kept(seq.k, (key * s.kv_heads + kv) * d + i);
    score /= std::sqrt(static_cast<double>(d));
    if (s.softcap > 0) score = s.softcap * std::tanh(score / s.softcap);
    scores.push_back(score);
    highest = std::max(highest, score);
  }
  double total = s.sinks ? std::exp(sink - highest) : 0;
  std::fill(values.begin(), values.end(), 0.0);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - highest);
    total += weight;
    for (int64_t j = 0; j < d; ++j)
      values[static_cast<size_t>(j)] +=
          weight * kept(seq.v, ((first + static_cast<int64_t>(i)) * s.kv_heads + kv) * d + j);
  }
  for (double& value : values) value /= total;
}

void check_exact(const Shape& s, const Sequence& seq, int cache_dtype, const Array& out) {
  std::vector<double> exact(static_cast<size_t>(s.head_dim));
  // bfloat16 queries go with weights rounded to bfloat16, whose errors average out.
  // An int8 cache is compared with what went in.
  const double bound = cache_dtype == 2 ? 3e-2 : out.dtype() == 0 && cache_dtype == 0 ? 2e-5 : 1.5e-2;
  for (int64_t query = 0; query < seq.length; query += seq.length > 100 ? 37 : 4) {
    for (int64_t head = 0; head < s.heads; ++head) {
      attend(s, seq, cache_dtype, query, head, exact);
      for (int64_t i = 0; i < s.head_dim; ++i) {
        const double got = out.get((query * s.heads + head) * s.head_dim + i);
        require(std::fabs(got - exact[static_cast<size_t>(i)]) <= bound,
                "attention: " + std::to_string(got) + " instead of " +
                    std::to_string(exact[static_cast<size_t>(i)]));
      }
    }
  }
}

void check_shape(const Shape& shape, int q_dtype, int cache_dtype, Digest& digest) {
  std::vector<Sequence> seqs;
  std::vector<const Sequence*> pointers;
  seqs.reserve(3);
  for (const int64_t length : kLengths)
    seqs.emplace_back(shape, q_dtype, length, 10 + 3 * static_cast<uint64_t>(length));
  for (const Sequence& seq : seqs) pointers.push_back(&seq);

  pagemill::set_num_threads(1);
  std::vector<Array> alone;
  for (const Sequence& seq : seqs) {
    Cache cache(shape, q_dtype, cache_dtype, 16, {&seq});
    cache.step({seq.length});
    check_exact(shape, seq, cache_dtype, cache.rows(0));
    alone.push_back(cache.rows(0));
    digest.add(alone.back().data(), static_cast<size_t>(alone.back().bytes()));
  }
  int turn = 0;
  for (const int64_t block_size : {16, 32, 7, 1}) {
    Cache cache(shape, q_dtype, cache_dtype, block_size, pointers);
    while (cache.left(0) + cache.left(1) + cache.left(2) > 0) {
      pagemill::set_num_threads(1 + turn % 2);
      std::vector<int64_t> counts;
      for (size_t i = 0; i < seqs.size(); ++i, ++turn)
        counts.push_back(std::min<int64_t>(cache.left(i), turn % 3 == 0 ? 1 : 23 * (turn % 4)));
      cache.step(counts);
    }
    for (size_t i = 0; i < seqs.size(); ++i)
      require(cache.rows(i).same(alone[i], 0, 0, alone[i].count()),
              "attention: chunks, blocks, mates or threads change bits");
  }
}

// Decoding of many sequences, of whose small units a thread takes some at a time: the rows of each alone.
void check_many(const Shape& shape, int q_dtype, int cache_dtype, Digest& digest) {
  constexpr int64_t kMany = 50;
  std::vector<Sequence> seqs;
  std::vector<const Sequence*> pointers;
  std::vector<int64_t> before;
  seqs.reserve(kMany);
  for (int64_t i = 0; i < kMany; ++i) {
    before.push_back(i == 20 ? 300 : i * 11 % 40);
    seqs.emplace_back(shape, q_dtype, before.back() + 1, 100 + 3 * static_cast<uint64_t>(i));
  }
  for (const Sequence& seq : seqs) pointers.push_back(&seq);
  std::vector<Cache> alone;
  pagemill::set_num_threads(1);
  for (const Sequence& seq : seqs) {
    alone.emplace_back(shape, q_dtype, cache_dtype, 16, std::vector<const Sequence*>{&seq});
    alone.back().step({seq.length});
  }
  for (const int threads : {1, 2, 3}) {
    pagemill::set_num_threads(threads);
    Cache cache(shape, q_dtype, cache_dtype, 16, pointers);
    cache.step(before);
    cache.step(std::vector<int64_t>(kMany, 1));
    for (size_t i = 0; i < seqs.size(); ++i) {
      const Array& rows = cache.rows(i);
      require(rows.same(alone[i].rows(0), 0, 0, rows.count()),
              "attention: decoding among many changes bits");
      digest.add(rows.data(), static_cast<size_t>(rows.bytes()));
    }
  }
}

}  // namespace

void check_attention(Digest& digest) {
  for (const Shape& shape : kShapes) {
    check_shape(shape, 0, 0, digest);
    check_shape(shape, 1, 1, digest);
    check_shape(shape, 0, 1, digest);
    check_shape(shape, 0, 2, digest);
    check_shape(shape, 1, 2, digest);
  }
  for (const Shape* shape : {&kShapes[0], &kShapes[1]}) {
    check_many(*shape, 0, 0, digest);
    check_many(*shape, 1, 2, digest);
  }
  require(pagemill::attention_scratch_bytes(8, 2, 64, 16, 512, 4096) > 0,
          "attention_scratch_bytes is nothing");
}

}  // namespace driver
