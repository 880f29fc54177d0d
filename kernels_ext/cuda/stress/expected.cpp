#include "expected.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "equivtest/accept.h"
#include "equivtest/law.h"

using namespace equivtest;

namespace {

void require(Fault fault) {
  if (!fault) return;
  std::fprintf(stderr, "the CPU refuses a row of the stress: %s\n", fault.problem);
  std::exit(2);
}

// Of u from the nearest step of the distribution function of weight(id).
template <class Weight>
double step_distance(int64_t vocab_size, double u, const Weight& weight) {
  double total = 0, cumulative = 0, distance = 1;
  for (int64_t id = 0; id < vocab_size; ++id) total += weight(id);
  if (!(total > 0)) return 1;
  for (int64_t id = 0; id + 1 < vocab_size; ++id) {
    cumulative += weight(id);
    distance = std::min(distance, std::fabs(cumulative / total - u));
  }
  return distance;
}

}  // namespace

void expect_law(const float* logits, int64_t vocab_size, const Params& params, float* out) {
  static LawBuffer buffer;
  float row_max;
  require(find_max(logits, vocab_size, params.temperature, &row_max));
  write_law(logits, vocab_size, RowLaw{params.temperature, params.top_k, params.top_p, params.min_p}, row_max, buffer,
            out);
}

Expected expect_tokens(const float* probs, int64_t vocab_size, const Drafts& drafts, bool match) {
  Drawer drawer;
  Expected out{std::vector<int64_t>(drafts.max_draft + 1, -1), 0, 0, 1};
  const auto coin = [&](int32_t slot, Purpose purpose) { return uniform(drafts.key, drafts.position + slot, purpose); };
  int64_t next = -1;
  if (match) {
    bool matches = true;
    for (int32_t slot = 0; slot <= drafts.num_draft; ++slot) {
      const float* p = probs + slot * vocab_size;
      int64_t token;
      require(sample_row(p, vocab_size, drafts.key, drafts.position + slot, Purpose::kPlain, drawer, &token));
      out.distance = std::min(out.distance, step_distance(vocab_size, coin(slot, Purpose::kPlain),
                                                          [&](int64_t id) { return static_cast<double>(p[id]); }));
      if (matches) next = token;
      const bool same = slot < drafts.num_draft && token == drafts.ids[slot];
      matches &= same, out.emitted += matches, out.telemetry += same;
    }
  } else {
    ChainResult result{};
    require(run_chain({drafts.ids, drafts.num_draft, probs, drafts.q, vocab_size, drafts.key, drafts.position}, drawer,
                      &result));
    out.emitted = result.emitted, out.telemetry = result.telemetry, next = result.next_token;
    for (int32_t slot = 0; slot < drafts.num_draft; ++slot) {
      const int64_t at = slot * vocab_size + drafts.ids[slot];
      const double p = probs[at], q = drafts.q ? drafts.q[at] : 1;
      if (q > 0) out.distance = std::min(out.distance, std::fabs(coin(slot, Purpose::kAccept) - p / q));
    }
    const int32_t last = out.emitted;
    const float* p = probs + last * vocab_size;
    const float* q = last < drafts.num_draft && drafts.q ? drafts.q + last * vocab_size : nullptr;
    const int64_t hole = last < drafts.num_draft && !drafts.q ? drafts.ids[last] : -1;
    const Purpose purpose = last < drafts.num_draft ? Purpose::kRecover
                            : drafts.num_draft > 0  ? Purpose::kBonus
                                                    : Purpose::kPlain;
    out.distance = std::min(out.distance, step_distance(vocab_size, coin(last, purpose), [&](int64_t id) {
                              return id == hole ? 0.0 : std::max(0.0, p[id] - (q ? static_cast<double>(q[id]) : 0.0));
                            }));
  }
  std::copy_n(drafts.ids, out.emitted, out.tokens.begin());
  out.tokens[out.emitted] = next;
  return out;
}
