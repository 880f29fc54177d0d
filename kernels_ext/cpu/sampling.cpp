#include "equivtest/accept.h"
#include "equivtest/law.h"
#include "rows.h"

namespace equivtest::cpu {

template <class T>
void find_maxima(const LawRows<T>& rows, int64_t begin, int64_t end, Fault* faults) {
  for (int64_t row = begin; row < end; ++row) {
    faults[row] = find_max(rows.logits + row * rows.vocab_size, rows.vocab_size, rows.temperature[row],
                           rows.row_max + row);
  }
}

template <class T>
void write_laws(const LawRows<T>& rows, int64_t begin, int64_t end) {
  thread_local LawBuffer buffer;
  for (int64_t row = begin; row < end; ++row) {
    const RowLaw law{rows.temperature[row], rows.top_k[row], rows.top_p[row], rows.min_p[row]};
    const int64_t out_row = rows.out_rows ? rows.out_rows[row] : row;
    write_law(rows.logits + row * rows.vocab_size, rows.vocab_size, law, rows.row_max[row], buffer,
              rows.out + out_row * rows.vocab_size);
  }
}

void run_chains(const ChainRows& rows, int64_t begin, int64_t end, Fault* faults) {
  Drawer drawer;
  for (int64_t row = begin; row < end; ++row) {
    const Chain chain{rows.draft_token_ids + row * rows.max_draft,
                      rows.num_draft[row],
                      rows.target_probs + row * (rows.max_draft + 1) * rows.vocab_size,
                      rows.draft_probs ? rows.draft_probs + row * rows.max_draft * rows.vocab_size : nullptr,
                      rows.vocab_size,
                      rows.keys[row],
                      rows.positions[row]};
    ChainResult result{};
    faults[row] = run_chain(chain, drawer, &result);
    rows.next_tokens[row] = result.next_token;
    rows.emitted[row] = result.emitted;
    rows.telemetry[row] = result.telemetry;
  }
}

void sample_rows(const SampleRows& rows, int64_t begin, int64_t end, Fault* faults) {
  Drawer drawer;
  for (int64_t row = begin; row < end; ++row) {
    faults[row] = sample_row(rows.target_probs + row * rows.vocab_size, rows.vocab_size, rows.keys[row],
                             rows.positions[row], rows.purpose, drawer, rows.tokens + row);
  }
}

template void find_maxima(const LawRows<float>&, int64_t, int64_t, Fault*);
template void find_maxima(const LawRows<bf16>&, int64_t, int64_t, Fault*);
template void write_laws(const LawRows<float>&, int64_t, int64_t);
template void write_laws(const LawRows<bf16>&, int64_t, int64_t);

}  // namespace equivtest::cpu
