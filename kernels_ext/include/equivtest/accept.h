// Chain rejection sampling of one row's draft block.
//
// Source: Leviathan, Kalman & Matias 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318),
// algorithm 2. Draft i is accepted when u * q(d) < p(d); the first rejection draws from relu(p - q), renormalised;
// full acceptance draws one more token from the target. p and q must be normalised to rounding: acceptance and the
// residual take them as they are. Draws are relative to the row's sum, so that this rounding does not matter to them.
#pragma once

#include <cstdint>

#include "equivtest/draw.h"
#include "equivtest/fault.h"
#include "equivtest/philox.h"

namespace equivtest {

struct Chain {
  const int64_t* draft_token_ids;  // [num_draft]
  int32_t num_draft;
  const float* target_probs;  // [num_draft + 1, vocab_size]
  const float* draft_probs;   // [num_draft, vocab_size]; null: point mass at each draft
  int64_t vocab_size;
  int64_t stream_key;
  int64_t position;
};

struct ChainResult {
  int32_t emitted;     // length of the accepted prefix
  int32_t telemetry;   // drafts whose own coin accepts, also past the first rejection
  int64_t next_token;  // recovered, bonus or plain
};

namespace detail {

inline Fault draw_from_target(const float* p, int64_t vocab_size, double u, Drawer& drawer, int64_t* token) {
  const double total = drawer.total(Plain{p}, vocab_size);
  if (!(total > 0)) return {"probabilities must not all be 0", total};
  *token = drawer.draw(Plain{p}, vocab_size, total, u);
  return {};
}

template <class Weights>
Fault draw_recovered(const Weights& residual, int64_t vocab_size, double u, Drawer& drawer, int64_t* token) {
  const double total = drawer.total(residual, vocab_size);
  // Rounding alone can leave the residual empty: p <= q everywhere, and yet the coin rejected.
  if (!(total > 0)) return draw_from_target(residual.p, vocab_size, u, drawer, token);
  *token = drawer.draw(residual, vocab_size, total, u);
  return {};
}

}  // namespace detail

// One draw from a row with the coin of that purpose at its position.
inline Fault sample_row(const float* p, int64_t vocab_size, int64_t stream_key, int64_t position, Purpose purpose,
                        Drawer& drawer, int64_t* token) {
  if (Fault fault = check_probs(p, vocab_size)) return fault;
  return detail::draw_from_target(p, vocab_size, uniform(stream_key, position, purpose), drawer, token);
}

// Accepts, recovers or adds a token. Looks at each draft's own entries, and at all of the rows it draws from.
inline Fault run_chain(const Chain& chain, Drawer& drawer, ChainResult* result) {
  int32_t emitted = 0, telemetry = 0;
  bool rejected = false;
  for (int32_t i = 0; i < chain.num_draft; ++i) {
    const int64_t draft = chain.draft_token_ids[i];
    const float p = chain.target_probs[i * chain.vocab_size + draft];
    const float q = chain.draft_probs ? chain.draft_probs[i * chain.vocab_size + draft] : 1.0f;
    if (!is_probability(p)) return {"probabilities must be finite and at least 0", p};
    if (!is_probability(q)) return {"draft probabilities must be finite and at least 0", q};
    const double u = uniform(chain.stream_key, chain.position + i, Purpose::kAccept);
    const bool accepted = u * static_cast<double>(q) < static_cast<double>(p);
    telemetry += accepted;
    rejected |= !accepted;
    emitted += !rejected;
  }
  result->emitted = emitted;
  result->telemetry = telemetry;

  const int64_t vocab_size = chain.vocab_size, position = chain.position + emitted;
  const float* p = chain.target_probs + emitted * vocab_size;
  if (Fault fault = check_probs(p, vocab_size)) return fault;
  if (emitted == chain.num_draft) {
    const Purpose purpose = chain.num_draft == 0 ? Purpose::kPlain : Purpose::kBonus;
    return detail::draw_from_target(p, vocab_size, uniform(chain.stream_key, position, purpose), drawer,
                                    &result->next_token);
  }
  const double u = uniform(chain.stream_key, position, Purpose::kRecover);
  if (chain.draft_probs == nullptr) {
    const Without residual{p, chain.draft_token_ids[emitted]};
    return detail::draw_recovered(residual, vocab_size, u, drawer, &result->next_token);
  }
  const float* q = chain.draft_probs + emitted * vocab_size;
  if (Fault fault = check_probs(q, vocab_size)) {
    return {"draft probabilities must be finite and at least 0", fault.value};
  }
  return detail::draw_recovered(Residual{p, q}, vocab_size, u, drawer, &result->next_token);
}

}  // namespace equivtest
