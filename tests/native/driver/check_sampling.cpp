#include <cmath>
#include <numeric>

#include "checks.h"
#include "sampling/sampling.h"

namespace driver {
namespace {

template <class T>
uintptr_t address(const std::vector<T>& v) {
  return reinterpret_cast<uintptr_t>(v.data());
}

struct Rows {
  int64_t rows, vocab;
  Array logits;
  Rows(int64_t count, int64_t size) : rows(count), vocab(size), logits(0, count * size, 8) {
    for (int64_t i = 0; i < count * size; ++i)
      logits.set(i, 8 * static_cast<float>(logits.get(i)));
    // Ties, which go to the lowest id.
    for (int64_t i = 0; size > 300 && i < count; ++i) {
      logits.set(i * size + 7, 9.0f);
      logits.set(i * size + 290, 9.0f);
    }
  }
  int64_t best(int64_t row) const {
    int64_t at = 0;
    for (int64_t i = 1; i < vocab; ++i)
      if (logits.get(row * vocab + i) > logits.get(row * vocab + at)) at = i;
    return at;
  }
};

void check_best(const Rows& r, std::vector<float>& highest) {
  std::vector<int64_t> best(static_cast<size_t>(r.rows));
  highest.resize(static_cast<size_t>(r.rows));
  pagemill::best_rows(r.logits.address(), r.vocab, r.rows, r.vocab, address(best),
                      address(highest));
  for (int64_t row = 0; row < r.rows; ++row)
    require(best[static_cast<size_t>(row)] == r.best(row), "best_rows: not the first largest");
}

void check_scores(const Rows& r, Digest& digest) {
  const size_t rows = static_cast<size_t>(r.rows);
  std::vector<int64_t> chosen, starts{0}, counts(rows, 3), ranks(rows * 2), top(rows * 3);
  for (int64_t row = 0; row < r.rows; ++row) {
    chosen.push_back(r.best(row));
    chosen.push_back((row * 31) % r.vocab);
    starts.push_back(static_cast<int64_t>(chosen.size()));
  }
  std::vector<double> normalizers(rows);
  pagemill::score_rows(r.logits.address(), r.vocab, r.rows, r.vocab, address(chosen),
                       address(starts), address(counts), address(normalizers), address(ranks),
                       address(top));
  for (size_t row = 0; row < rows; ++row) {
    double sum = 0;
    int64_t above = 0;
    const int64_t start = static_cast<int64_t>(row) * r.vocab, other = chosen[2 * row + 1];
    for (int64_t i = 0; i < r.vocab; ++i) {
      sum += std::exp(r.logits.get(start + i));
      above += r.logits.get(start + i) > r.logits.get(start + other) ? 1 : 0;
    }
    require(std::fabs(normalizers[row] - std::log(sum)) < 1e-5, "score_rows: a wrong normalizer");
    require(ranks[2 * row] == 1 && ranks[2 * row + 1] == above + 1, "score_rows: a wrong rank");
    require(top[3 * row] == r.best(static_cast<int64_t>(row)), "score_rows: a wrong best");
    for (size_t i = 1; i < 3; ++i)
      require(r.logits.get(start + top[3 * row + i]) <= r.logits.get(start + top[3 * row + i - 1]),
              "score_rows: alternatives rise");
  }
  digest.add(normalizers.data(), rows * sizeof(double));
  digest.add(top.data(), top.size() * sizeof(int64_t));
}

void check_draws(const Rows& r, const std::vector<float>& highest, Digest& digest) {
  const size_t rows = static_cast<size_t>(r.rows);
  std::vector<double> numbers;
  std::vector<int64_t> wholes, tokens(rows * 2), again(rows * 2), alone(2);
  for (int64_t row = 0; row < r.rows; ++row) {
    for (const double x : {0.5 + 0.25 * static_cast<double>(row % 3), row % 2 ? 0.8 : 1.0,
                           row % 5 ? 0.0 : 0.05})
      numbers.push_back(x);
    for (const int64_t x : {row, row % 4 == 0 ? int64_t{1} : row % 4 * 10, row * 7, int64_t{0},
                            row + 3, int64_t{2}})
      wholes.push_back(x);
  }
  for (const int threads : {1, 2}) {
    pagemill::set_num_threads(threads);
    std::vector<int64_t>& into = threads == 1 ? tokens : again;
    pagemill::draw_rows(r.logits.address(), r.vocab, r.vocab, r.rows, address(highest),
                        address(numbers), address(wholes), address(into));
  }
  require(tokens == again, "draw_rows: two threads change tokens");
  for (size_t row = 0; row < rows; ++row) {
    require(tokens[2 * row] >= 0 && tokens[2 * row] < r.vocab, "draw_rows: no token");
    if (row % 4 == 0)
      require(tokens[2 * row] == r.best(static_cast<int64_t>(row)), "draw_rows: not the only one");
    pagemill::draw_rows(r.logits.address(), r.vocab, r.vocab, 1,
                        address(highest) + row * sizeof(float),
                        address(numbers) + row * 3 * sizeof(double),
                        address(wholes) + row * 6 * sizeof(int64_t), address(alone));
    require(alone[0] == tokens[2 * row] && alone[1] == tokens[2 * row + 1],
            "draw_rows: a row alone draws others");
  }
  digest.add(tokens.data(), tokens.size() * sizeof(int64_t));
}

void check_penalties() {
  Array row(0, 5);
  for (int64_t i = 0; i < 5; ++i) row.set(i, i % 2 ? -2.0f : 4.0f);
  const std::vector<int32_t> tokens{0, 1, 1, 2, 1};  // the first two are the prompt
  pagemill::penalize_row(row.address(), 5, address(tokens), 5, 2, 2.0f, 0.25f, 1.0f);
  // Repetition counts all, frequency and presence the output.
  const double want[] = {2.0, -4.0 - 2 * 0.25 - 1.0, 2.0 - 0.25 - 1.0, -2.0, 4.0};
  for (int64_t i = 0; i < 5; ++i)
    require(std::fabs(row.get(i) - want[i]) < 1e-6, "penalize_row: a wrong logit");
}

}  // namespace

void check_sampling(Digest& digest) {
  for (const int64_t vocab : {5, 1000, 50021}) {
    const Rows rows(9, vocab);
    std::vector<float> highest;
    check_best(rows, highest);
    check_scores(rows, digest);
    check_draws(rows, highest, digest);
  }
  check_penalties();
}

}  // namespace driver
