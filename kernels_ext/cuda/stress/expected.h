// What the CPU's headers make of the same inputs. A unit of its own: they use vector types that nvcc does not know.
#pragma once

#include <cstdint>
#include <vector>

struct Params {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

struct Expected {
  std::vector<int64_t> tokens;  // [max_draft + 1], -1 past what is put out
  int32_t emitted, telemetry;
  double distance;  // of the nearest coin from the value at which the outputs would change
};

struct Drafts {
  const int64_t* ids;  // [max_draft]
  const float* q;      // [max_draft, vocab_size]; null: point masses
  int32_t num_draft, max_draft;
  int64_t key, position;
};

// The law of one row: [vocab_size].
void expect_law(const float* logits, int64_t vocab_size, const Params& params, float* out);

// The chain, or the match rule, on rows of probabilities [num_draft + 1, vocab_size].
Expected expect_tokens(const float* probs, int64_t vocab_size, const Drafts& drafts, bool match);
