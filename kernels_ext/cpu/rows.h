// The CPU kernels over ranges of rows, free of torch: what the binding runs in parallel.
//
// Every function does the rows [begin, end) of its call on the calling thread.
#pragma once

#include <cstdint>

#include "equivtest/fault.h"
#include "equivtest/philox.h"

namespace equivtest::cpu {

template <class T>
struct LawRows {
  const T* logits;  // [num_rows, vocab_size]
  int64_t vocab_size;
  const float* temperature;  // [num_rows], as are the next three
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  float* row_max;           // [num_rows], from find_maxima to write_laws
  const int64_t* out_rows;  // [num_rows]; null: the same row
  float* out;               // [num_out_rows, vocab_size]
};

template <class T>
void find_maxima(const LawRows<T>& rows, int64_t begin, int64_t end, Fault* faults);

template <class T>
void write_laws(const LawRows<T>& rows, int64_t begin, int64_t end);

struct ChainRows {
  const int64_t* draft_token_ids;  // [batch, max_draft]
  const int32_t* num_draft;        // [batch]
  const float* target_probs;       // [batch, max_draft + 1, vocab_size]
  const float* draft_probs;        // [batch, max_draft, vocab_size]; null: point mass at each draft
  const int64_t* keys;             // [batch]
  const int64_t* positions;        // [batch]
  int64_t max_draft, vocab_size;
  int64_t* next_tokens;  // [batch]
  int32_t* emitted;      // [batch]
  int32_t* telemetry;    // [batch]
};

void run_chains(const ChainRows& rows, int64_t begin, int64_t end, Fault* faults);

struct SampleRows {
  const float* target_probs;  // [batch, vocab_size]
  const int64_t* keys;        // [batch]
  const int64_t* positions;   // [batch]
  Purpose purpose;            // of the coins
  int64_t vocab_size;
  int64_t* tokens;  // [batch]
};

void sample_rows(const SampleRows& rows, int64_t begin, int64_t end, Fault* faults);

// Some query rows of one sequence, all of whose heads attend.
struct AttentionItem {
  int64_t sequence;
  int64_t first_row, num_rows;  // rows of `query`
  int64_t first_visible;        // how many tokens the first of them sees; each next one sees one more
};

template <class T>
struct AttentionRows {
  const T* query;             // [num_rows, num_heads, head_dim]
  const T* kv_pages;          // [num_pages, 2, page_size, num_kv_heads, head_dim]
  const int32_t* page_table;  // [batch, max_pages]
  int64_t num_heads, num_kv_heads, head_dim, page_size, max_pages;
  const AttentionItem* items;
  T* out;  // [num_rows, num_heads, head_dim]
};

// Work unit i is key/value head i % num_kv_heads of item i / num_kv_heads.
template <class T>
void attend_items(const AttentionRows<T>& rows, int64_t begin, int64_t end);

}  // namespace equivtest::cpu
