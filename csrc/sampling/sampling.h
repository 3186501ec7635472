// Choosing tokens from rows of logits over large vocabularies, without sorting a row.
//
// A row is cut into blocks of 256. A first pass takes each block's maximum; only blocks whose maximum
// reaches a level can hold tokens that do. Sums are float64: sixteen running sums a block, blocks one
// after another.
//
// Exactness: a row's results depend on that row and its settings alone. Rows are dealt to threads
// whole. Ties go to the lowest id.
#pragma once

#include <cstdint>

namespace pagemill {

// best[rows] int64 and highest[rows] float32 become the first largest entry of each row of
// logits[rows, vocab] float32 (`stride` elements from row to row); highest is NaN where the row has one.
void best_rows(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t best,
               uintptr_t highest);

// Draw tokens. `count` rows are described by highest[count] float32, finite, and
//   numbers[count][3] float64   temperature, top_p, min_p
//   wholes[count][6] int64      row, top_k (<= 0: off), seed, sample index, position, number of draws
// tokens int64 gets the draws of the rows one after another. Weights are exp((logit - highest) /
// temperature); of them min_p, top_k and top_p keep what pagemill.sampling.draw says; draw i of a row
// uses the Philox4x32-10 number of (seed, sample index + i, position).
void draw_rows(uintptr_t logits, int64_t stride, int64_t vocab, int64_t count, uintptr_t highest,
               uintptr_t numbers, uintptr_t wholes, uintptr_t tokens);

// For each row: its normalizer log(sum(exp)) float64; the ranks int64 (from 1) of the tokens
// chosen[starts[row]..starts[row + 1]); and the ids int64 of its counts[row] largest entries, falling, one row
// after another. starts has rows + 1 entries.
void score_rows(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t chosen,
                uintptr_t starts, uintptr_t counts, uintptr_t normalizers, uintptr_t ranks,
                uintptr_t top_ids);

// Penalize one row [vocab] float32 in place for `count` tokens int32, the first `prompt` of which are the
// prompt; see pagemill.sampling.penalties, whose bits this has.
void penalize_row(uintptr_t logits, int64_t vocab, uintptr_t tokens, int64_t count, int64_t prompt,
                  float repetition, float frequency, float presence);

}  // namespace pagemill
