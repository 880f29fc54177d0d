#include "equivtest/attention.h"

#include "rows.h"

namespace equivtest::cpu {

namespace {

template <int kVectors, class T>
void attend_one(const AttentionRows<T>& rows, const AttentionItem& item, int64_t kv_head, AttentionBuffer& buffer,
                std::vector<int64_t>& visible) {
  constexpr int64_t kDim = kVectors * kLanes;
  const int64_t group = rows.num_heads / rows.num_kv_heads, num_rows = item.num_rows * group;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(rows.head_dim)));
  buffer.query.assign(num_rows * kDim, 0.0f);
  buffer.output.resize(num_rows * kDim);
  visible.resize(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t query_row = item.first_row + row / group, head = kv_head * group + row % group;
    const T* from = rows.query + (query_row * rows.num_heads + head) * rows.head_dim;
    for (int64_t i = 0; i < rows.head_dim; ++i) buffer.query[row * kDim + i] = to_float(from[i]) * scale;
    visible[row] = item.first_visible + row / group;
  }
  const PagedSequence<T> sequence{rows.kv_pages,     rows.page_table + item.sequence * rows.max_pages,
                                  rows.page_size,    rows.num_kv_heads,
                                  rows.head_dim,     kv_head};
  attend<kVectors>(sequence, buffer.query.data(), visible.data(), num_rows, buffer, buffer.output.data());
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t query_row = item.first_row + row / group, head = kv_head * group + row % group;
    T* to = rows.out + (query_row * rows.num_heads + head) * rows.head_dim;
    for (int64_t i = 0; i < rows.head_dim; ++i) from_float(buffer.output[row * kDim + i], to + i);
  }
}

template <int kVectors, class T>
void attend_range(const AttentionRows<T>& rows, int64_t begin, int64_t end) {
  thread_local AttentionBuffer buffer;
  thread_local std::vector<int64_t> visible;
  for (int64_t i = begin; i < end; ++i) {
    attend_one<kVectors>(rows, rows.items[i / rows.num_kv_heads], i % rows.num_kv_heads, buffer, visible);
  }
}

}  // namespace

template <class T>
void attend_items(const AttentionRows<T>& rows, int64_t begin, int64_t end) {
  switch ((rows.head_dim + kLanes - 1) / kLanes) {  // head_dim is at most 128: the wrapper checks it
    case 1: return attend_range<1>(rows, begin, end);
    case 2: return attend_range<2>(rows, begin, end);
    case 3: return attend_range<3>(rows, begin, end);
    case 4: return attend_range<4>(rows, begin, end);
    case 5: return attend_range<5>(rows, begin, end);
    case 6: return attend_range<6>(rows, begin, end);
    case 7: return attend_range<7>(rows, begin, end);
    default: return attend_range<8>(rows, begin, end);
  }
}

template void attend_items(const AttentionRows<float>&, int64_t, int64_t);
template void attend_items(const AttentionRows<bf16>&, int64_t, int64_t);

}  // namespace equivtest::cpu
