// The custom ops as torch sees them: schemas, tensors to pointers, rows to threads, faults to exceptions.
//
// Shapes, dtypes and devices are checked by equivtest/kernels/contract.py before a call. A value that a
// kernel finds wrong is thrown as ValueError "row=<n> value=<x> problem=<text>", which the wrapper turns into
// InvalidKernelInput; outputs are written only when every row is fine.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/rows.h"
#include "equivtest/simd.h"

namespace equivtest {
namespace {

using at::Tensor;

void refuse(int64_t row, const Fault& fault) {
  TORCH_CHECK_VALUE(!fault, "row=", row, " value=", fault.value, " problem=", fault.problem);
}

void throw_first(const std::vector<Fault>& faults) {
  for (size_t row = 0; row < faults.size(); ++row) refuse(static_cast<int64_t>(row), faults[row]);
}

template <class Work>
void over_rows(int64_t num_rows, const Work& work) {
  at::parallel_for(0, num_rows, 1, work);
}

template <class T>
void verify_probs_as(const T* logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                     const Tensor& min_p, const std::optional<Tensor>& out_rows, const Tensor& out) {
  const int64_t num_rows = temperature.size(0);
  std::vector<float> row_max(num_rows);
  std::vector<Fault> faults(num_rows);
  const cpu::LawRows<T> rows{logits,
                             out.size(1),
                             temperature.const_data_ptr<float>(),
                             top_k.const_data_ptr<int32_t>(),
                             top_p.const_data_ptr<float>(),
                             min_p.const_data_ptr<float>(),
                             row_max.data(),
                             out_rows ? out_rows->const_data_ptr<int64_t>() : nullptr,
                             out.mutable_data_ptr<float>()};
  over_rows(num_rows, [&](int64_t begin, int64_t end) { cpu::find_maxima(rows, begin, end, faults.data()); });
  throw_first(faults);
  over_rows(num_rows, [&](int64_t begin, int64_t end) { cpu::write_laws(rows, begin, end); });
}

const bf16* bf16_data(const Tensor& tensor) { return reinterpret_cast<const bf16*>(tensor.const_data_ptr()); }

void verify_probs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                  const Tensor& min_p, const std::optional<Tensor>& out_rows, const Tensor& out) {
  if (logits.scalar_type() == at::kBFloat16) {
    verify_probs_as(bf16_data(logits), temperature, top_k, top_p, min_p, out_rows, out);
  } else {
    verify_probs_as(logits.const_data_ptr<float>(), temperature, top_k, top_p, min_p, out_rows, out);
  }
}

void spec_accept(const Tensor& draft_token_ids, const Tensor& num_draft, const Tensor& target_probs,
                 const std::optional<Tensor>& draft_probs, const Tensor& keys, const Tensor& positions,
                 const Tensor& output_token_ids, const Tensor& emitted, const Tensor& telemetry) {
  const int64_t batch = target_probs.size(0), max_draft = target_probs.size(1) - 1;
  std::vector<int64_t> next_tokens(batch);
  std::vector<int32_t> new_emitted(batch), new_telemetry(batch);
  std::vector<Fault> faults(batch);
  const int64_t* drafts = draft_token_ids.const_data_ptr<int64_t>();
  const cpu::ChainRows rows{drafts,
                            num_draft.const_data_ptr<int32_t>(),
                            target_probs.const_data_ptr<float>(),
                            draft_probs ? draft_probs->const_data_ptr<float>() : nullptr,
                            keys.const_data_ptr<int64_t>(),
                            positions.const_data_ptr<int64_t>(),
                            max_draft,
                            target_probs.size(2),
                            next_tokens.data(),
                            new_emitted.data(),
                            new_telemetry.data()};
  over_rows(batch, [&](int64_t begin, int64_t end) { cpu::run_chains(rows, begin, end, faults.data()); });
  throw_first(faults);
  std::copy(new_emitted.begin(), new_emitted.end(), emitted.mutable_data_ptr<int32_t>());
  std::copy(new_telemetry.begin(), new_telemetry.end(), telemetry.mutable_data_ptr<int32_t>());
  int64_t* output = output_token_ids.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row, output += max_draft + 1) {
    const int32_t length = new_emitted[row];
    std::copy_n(drafts + row * max_draft, length, output);
    output[length] = next_tokens[row];
    std::fill(output + length + 1, output + max_draft + 1, int64_t{-1});
  }
}

void sample(const Tensor& target_probs, const Tensor& keys, const Tensor& positions, int64_t purpose,
            const Tensor& out) {
  const int64_t batch = target_probs.size(0);
  std::vector<int64_t> tokens(batch);
  std::vector<Fault> faults(batch);
  const cpu::SampleRows rows{target_probs.const_data_ptr<float>(), keys.const_data_ptr<int64_t>(),
                             positions.const_data_ptr<int64_t>(), static_cast<Purpose>(purpose),
                             target_probs.size(1), tokens.data()};
  over_rows(batch, [&](int64_t begin, int64_t end) { cpu::sample_rows(rows, begin, end, faults.data()); });
  throw_first(faults);
  std::copy(tokens.begin(), tokens.end(), out.mutable_data_ptr<int64_t>());
}

// The C++ twin of contract.check_paged_attention_values, with the same words.
Fault check_sequence(const int32_t* starts, int64_t length, const int32_t* pages, int64_t page_size, int64_t max_pages,
                     int64_t num_pages) {
  const int64_t num_rows = int64_t{starts[1]} - starts[0];
  if (num_rows < 0) return {"query_start must not decrease", static_cast<double>(num_rows)};
  if (length < num_rows || length > max_pages * page_size) {
    return {"kv_lens must count at least the sequence's own rows and fit its pages", static_cast<double>(length)};
  }
  for (int64_t i = 0; i * page_size < length; ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages) return {"page id must be one of kv_pages", static_cast<double>(pages[i])};
  }
  return {};
}

// Cuts each sequence's query rows into pieces of at most this many, so that one long prompt feeds every thread.
constexpr int64_t kRowsPerItem = 32;

template <class T>
void paged_attention_as(const T* query, const T* kv_pages, const Tensor& pages, const Tensor& page_table,
                        const Tensor& kv_lens, const Tensor& query_start, const Tensor& out, T* out_data) {
  std::vector<cpu::AttentionItem> items;
  const int32_t* lengths = kv_lens.const_data_ptr<int32_t>();
  const int32_t* starts = query_start.const_data_ptr<int32_t>();
  const int32_t* table = page_table.const_data_ptr<int32_t>();
  const int64_t batch = kv_lens.size(0), page_size = pages.size(2), max_pages = page_table.size(1);
  for (int64_t b = 0; b < batch; ++b) {
    refuse(b, check_sequence(starts + b, lengths[b], table + b * max_pages, page_size, max_pages, pages.size(0)));
  }
  const char* span = "query_start must run from 0 to the number of query rows";
  if (starts[0] != 0) refuse(0, {span, static_cast<double>(starts[0])});
  if (starts[batch] != out.size(0)) refuse(1, {span, static_cast<double>(starts[batch])});
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    const int64_t start = starts[sequence], num_rows = starts[sequence + 1] - start;
    for (int64_t row = 0; row < num_rows; row += kRowsPerItem) {
      items.push_back({sequence, start + row, std::min(kRowsPerItem, num_rows - row),
                       lengths[sequence] - num_rows + row + 1});
    }
  }
  const cpu::AttentionRows<T> rows{query,       kv_pages,  table,     out.size(1),  pages.size(3),
                                   out.size(2), page_size, max_pages, items.data(), out_data};
  over_rows(static_cast<int64_t>(items.size()) * rows.num_kv_heads,
            [&](int64_t begin, int64_t end) { cpu::attend_items(rows, begin, end); });
}

void paged_attention(const Tensor& query, const Tensor& kv_pages, const Tensor& page_table, const Tensor& kv_lens,
                     const Tensor& query_start, const Tensor& out) {
  if (query.scalar_type() == at::kBFloat16) {
    paged_attention_as(bf16_data(query), bf16_data(kv_pages), kv_pages, page_table, kv_lens, query_start, out,
                       reinterpret_cast<bf16*>(out.mutable_data_ptr()));
  } else {
    paged_attention_as(query.const_data_ptr<float>(), kv_pages.const_data_ptr<float>(), kv_pages, page_table, kv_lens,
                       query_start, out, out.mutable_data_ptr<float>());
  }
}

}  // namespace

TORCH_LIBRARY(equivtest, library) {
  library.def(
      "verify_probs(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? out_rows, "
      "Tensor(a!) out) -> ()");
  library.def(
      "spec_accept(Tensor draft_token_ids, Tensor num_draft, Tensor target_probs, Tensor? draft_probs, Tensor keys, "
      "Tensor positions, Tensor(a!) output_token_ids, Tensor(b!) emitted, Tensor(c!) acceptance_telemetry) -> ()");
  library.def("sample(Tensor target_probs, Tensor keys, Tensor positions, int purpose, Tensor(a!) out) -> ()");
  library.def(
      "paged_attention(Tensor query, Tensor kv_pages, Tensor page_table, Tensor kv_lens, Tensor query_start, "
      "Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(equivtest, CPU, library) {
  library.impl("verify_probs", &verify_probs);
  library.impl("spec_accept", &spec_accept);
  library.impl("sample", &sample);
  library.impl("paged_attention", &paged_attention);
}

}  // namespace equivtest
