// The sampling kernels on odd shapes, for compute-sanitizer and by themselves: no torch, no Python.
//
// Every call has its outputs poisoned first and its inputs in allocations of exactly their size. Tokens are compared
// with the CPU's headers on the same coins, and bit for bit with those of the request alone, whose rows several blocks
// share where the vocabulary is large. Where they differ, some coin must lie within rounding of the value at which
// the outcome changes, and such requests must be rare; the largest law error and the number of requests that differ are
// printed for each shape. Exits with 1 where a shape failed. `--few` runs small shapes, for racecheck.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "expected.h"

extern "C" {
const char* equivtest_accept_logits(const void* logits, int64_t is_bfloat16, int64_t num_rows, const int* row_start,
                                    const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                                    const int64_t* draft_token_ids, const int* num_draft, const float* draft_probs,
                                    const int64_t* keys, const int64_t* positions, int64_t batch, int64_t max_draft,
                                    int64_t vocab_size, int64_t rule, int64_t* row_tokens, int* row_accepts,
                                    unsigned long long* row_refusal, int64_t* output_token_ids, int* emitted,
                                    int* telemetry, double* refusal, void* stream);
const char* equivtest_law_of_logits(const void* logits, int64_t is_bfloat16, const float* temperature,
                                    const int* top_k, const float* top_p, const float* min_p, int64_t num_rows,
                                    int64_t vocab_size, const int64_t* out_rows, float* out, int64_t task,
                                    unsigned long long* row_refusal, void* stream);
const char* equivtest_judge_probs(const float* target_probs, const int64_t* draft_token_ids, const int* num_draft,
                                  const float* draft_probs, const int64_t* keys, const int64_t* positions,
                                  int64_t batch, int64_t max_draft, int64_t vocab_size, int64_t purpose,
                                  int64_t* row_tokens, int* row_accepts, unsigned long long* row_refusal, void* stream);
const char* equivtest_put_out(const int64_t* draft_token_ids, const int* num_draft, int64_t batch, int64_t max_draft,
                              int64_t* row_tokens, int* row_accepts, unsigned long long* row_refusal,
                              int64_t* output_token_ids, int* emitted, int* telemetry, void* stream);
}

namespace {

constexpr int kPoison = 0x7b;
constexpr int64_t kMaxChecked = int64_t{12} << 20;  // probabilities that the CPU looks at in one shape
constexpr double kNear = 2e-5;                      // float32 sums and exponentials differ by less than this

const Params kLaws[] = {{0.8f, 0, 0.95f, 0},  {1, 0, 1, 0},           {0, 0, 1, 0},         {1, 50, 1, 0},
                        {0.7f, 20, 0.9f, 0},  {0.8f, 0, 1, 0.05f},    {3, 0, 0.5f, 0},      {1.3f, 5000, 0.999f, 1e-4f},
                        {1, 1, 1, 0},         {1, 0, 0.0078125f, 0},  {0.05f, 0, 0.95f, 0}, {1, 0, 0.9f, 0.01f},
                        {1, 100000, 1, 0},    {0.9f, 1000, 1, 0.01f}};
constexpr int kNumLaws = sizeof(kLaws) / sizeof(kLaws[0]);

struct Shape {
  int64_t vocab_size, batch, max_draft;
  bool is_bfloat16, has_q;
};

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

void require(const char* error) {
  if (error == nullptr) return;
  std::fprintf(stderr, "launch: %s\n", error);
  std::exit(2);
}

template <class T>
struct Buffer {
  explicit Buffer(int64_t count) : count(count) {
    require(cudaMalloc(&data, std::max<int64_t>(1, count) * sizeof(T)));
    poison();
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<int64_t>(values.size())) {
    if (count) require(cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }

  void poison(int byte = kPoison) { require(cudaMemset(data, byte, count * sizeof(T))); }
  std::vector<T> read(int64_t from, int64_t how_many) const {
    std::vector<T> out(how_many);
    if (how_many) require(cudaMemcpy(out.data(), data + from, how_many * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  std::vector<T> read() const { return read(0, count); }

  T* data = nullptr;
  int64_t count;
};

__host__ __device__ uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// About normal, of the scale of its row: like a language model's, flat, full of ties, or with masked tokens. The first
// token is never masked.
template <class T>
__global__ void fill_logits(T* logits, int64_t vocab_size, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; at < count; at += stride) {
    const int64_t row = at / vocab_size, id = at % vocab_size;
    const uint64_t hash = mix(at + 1);
    float x = -4 * 32767.5f;
    for (int word = 0; word < 4; ++word) x += static_cast<float>(hash >> (16 * word) & 0xffff);
    x *= 1.0f / 37837;
    switch (mix(row) % 4) {
      case 0: x = 3 * x + (id % 97 == 5 ? 3 * fabsf(x) : 0.0f) + (id == vocab_size / 3 ? 15.0f : 0.0f); break;
      case 1: x *= 0.05f; break;
      case 2: x = rintf(4 * x) / 4; break;
      default: x = id % 3 == 1 ? -INFINITY : 2 * x; break;
    }
    logits[at] = static_cast<T>(x);
  }
}

__global__ void fill_q(float* q, int64_t vocab_size, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; at < count; at += stride) {
    q[at] = static_cast<float>(mix(~at) >> 40) * 0x1p-23f / static_cast<float>(vocab_size);
  }
}

struct Failure {
  int count = 0;
  void expect(bool holds, const char* what, int64_t request) {
    if (!holds && ++count <= 5) std::printf("  FAILED: %s, request %lld\n", what, static_cast<long long>(request));
  }
};

// One shape's inputs and outputs on the device, and what of them the host needs.
template <class T>
class Stress {
 public:
  explicit Stress(const Shape& shape)
      : s(shape),
        width(s.max_draft + 1),
        num_draft_(draft_counts(s)),
        row_start_(starts(num_draft_)),
        num_rows(row_start_.back()),
        logits(num_rows * s.vocab_size),
        q(s.has_q ? s.batch * s.max_draft * s.vocab_size : 0),
        row_tokens(s.batch * width),
        row_accepts(s.batch * width),
        row_refusal(1),
        tokens(s.batch * width),
        emitted(s.batch),
        telemetry(s.batch),
        refusal(3) {
    fill_logits<<<512, 256>>>(logits.data, s.vocab_size, logits.count);
    if (q.count) fill_q<<<512, 256>>>(q.data, s.vocab_size, q.count);
    require(cudaDeviceSynchronize());
    row_refusal.poison(0xff);
    const int64_t each = std::max<int64_t>(1, width * s.vocab_size);
    const int64_t checked = std::min(s.batch, std::max<int64_t>(4, kMaxChecked / each));
    for (int64_t i = 0; i < checked; ++i) checked_.push_back(i * s.batch / checked);
    draft_ids_.resize(s.batch * s.max_draft);
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t slot = 0; slot < s.max_draft; ++slot) {
        draft_ids_[b * s.max_draft + slot] = static_cast<int64_t>(mix(7 * b + 131 * slot + 3) % s.vocab_size);
        if (slot >= num_draft_[b]) draft_ids_[b * s.max_draft + slot] = slot % 2 ? -7 : int64_t{1} << 40;  // ignored
      }
      keys_.push_back(static_cast<int64_t>(mix(b)));
      positions_.push_back(b % 1000);
    }
    for (const int64_t b : checked_) {  // likely drafts where the host knows the row
      for (int64_t slot = 0; slot < num_draft_[b]; slot += 2) {
        const std::vector<float> row = row_of(row_start_[b] + slot);
        draft_ids_[b * s.max_draft + slot] = std::max_element(row.begin(), row.end()) - row.begin();
      }
    }
  }

  int run() {
    Buffer<int> num_draft(num_draft_), row_start(std::vector<int>(row_start_.begin(), row_start_.end() - 1));
    Buffer<int64_t> draft_ids(draft_ids_), keys(keys_), positions(positions_);
    std::vector<float> temperature, top_p, min_p;
    std::vector<int> top_k;
    for (int64_t b = 0; b < s.batch; ++b) {
      const Params& law = law_of(b);
      temperature.push_back(law.temperature), top_k.push_back(law.top_k);
      top_p.push_back(law.top_p), min_p.push_back(law.min_p);
    }
    Buffer<float> t(temperature), p(top_p), m(min_p);
    Buffer<int> k(top_k);
    const auto accept_some = [&](bool match, int64_t b, int64_t batch) {
      poison();
      require(equivtest_accept_logits(
          logits.data, s.is_bfloat16, num_rows, row_start.data + b, t.data + b, k.data + b, p.data + b, m.data + b,
          draft_ids.data + b * s.max_draft, num_draft.data + b,
          s.has_q ? q.data + b * s.max_draft * s.vocab_size : nullptr, keys.data + b, positions.data + b, batch,
          s.max_draft, s.vocab_size, match, row_tokens.data, row_accepts.data, row_refusal.data, tokens.data,
          emitted.data, telemetry.data, refusal.data, nullptr));
      require(cudaDeviceSynchronize());
    };
    const auto accept = [&](bool match) { accept_some(match, 0, s.batch); };
    for (const bool match : {false, true}) {
      accept(match);
      failure_.expect(refusal.read()[0] == 0, "a good call is refused", 0);
      compare(match, nullptr);
      const auto before = tokens.read();
      accept(match);
      failure_.expect(before == tokens.read(), "a second call puts out other tokens", 0);
      const auto telemetry_before = telemetry.read();
      for (const int64_t b : checked_) {  // alone, where more blocks share a row
        accept_some(match, b, 1);
        const std::vector<int64_t> own(before.begin() + b * width, before.begin() + (b + 1) * width);
        failure_.expect(tokens.read(0, width) == own && telemetry.read(0, 1)[0] == telemetry_before[b],
                        "alone it puts out other tokens", b);
      }
    }
    plain_contract(draft_ids, num_draft, keys, positions);
    refuse(accept);
    const double share = static_cast<double>(num_different_) / std::max<int64_t>(1, num_compared_);
    failure_.expect(num_different_ <= 3 + num_compared_ / 200, "too many requests near a boundary", num_different_);
    std::printf("%s vocab %lld batch %lld draft %lld %s%s: %lld requests, %.4f%% near a boundary, law error %.1e\n",
                failure_.count ? "FAILED" : "ok", static_cast<long long>(s.vocab_size),
                static_cast<long long>(s.batch), static_cast<long long>(s.max_draft),
                s.is_bfloat16 ? "bfloat16" : "float32", s.has_q ? " q" : "", static_cast<long long>(num_compared_),
                100 * share, law_error_);
    return failure_.count;
  }

 private:
  static std::vector<int> draft_counts(const Shape& s) {
    std::vector<int> counts;
    for (int64_t b = 0; b < s.batch; ++b)
      counts.push_back(static_cast<int>(b % 3 ? s.max_draft : mix(b) % (s.max_draft + 1)));
    return counts;
  }

  static std::vector<int64_t> starts(const std::vector<int>& counts) {
    std::vector<int64_t> out{0};
    for (const int count : counts) out.push_back(out.back() + count + 1);
    return out;
  }

  static const Params& law_of(int64_t request) { return kLaws[request % kNumLaws]; }

  std::vector<float> row_of(int64_t row) const {
    const std::vector<T> raw = logits.read(row * s.vocab_size, s.vocab_size);
    return std::vector<float>(raw.begin(), raw.end());
  }

  void poison() {
    row_tokens.poison(), row_accepts.poison(), tokens.poison(), emitted.poison(), telemetry.poison(), refusal.poison();
  }

  Drafts drafts_of(int64_t b, const std::vector<float>& q_rows) const {
    return {draft_ids_.data() + b * s.max_draft, s.has_q ? q_rows.data() : nullptr, num_draft_[b],
            static_cast<int32_t>(s.max_draft), keys_[b], positions_[b]};
  }

  // The outputs of the last call against the CPU's, on its own laws or on `probs` [batch, max_draft + 1, vocab_size].
  void compare(bool match, const Buffer<float>* probs) {
    const auto all_tokens = tokens.read();
    const auto all_emitted = emitted.read(), all_telemetry = telemetry.read();
    for (const int64_t b : checked_) {
      const int64_t rows = num_draft_[b] + 1, size = s.vocab_size;
      std::vector<float> law(rows * size);
      if (probs) {
        law = probs->read(b * width * size, rows * size);
      } else {
        for (int64_t slot = 0; slot < rows; ++slot)
          expect_law(row_of(row_start_[b] + slot).data(), size, law_of(b), law.data() + slot * size);
      }
      const std::vector<float> q_rows =
          s.has_q ? q.read(b * s.max_draft * size, num_draft_[b] * size) : std::vector<float>();
      const Expected expected = expect_tokens(law.data(), size, drafts_of(b, q_rows), match);
      const bool same = std::equal(expected.tokens.begin(), expected.tokens.end(), all_tokens.begin() + b * width) &&
                        expected.emitted == all_emitted[b] && expected.telemetry == all_telemetry[b];
      ++num_compared_, num_different_ += !same;
      failure_.expect(same || expected.distance < (probs ? 1e-9 : kNear), match ? "match" : "chain", b);
    }
  }

  // verify_probs into [batch, max_draft + 1] rows, spec_accept on them, sample from the first of them.
  void plain_contract(const Buffer<int64_t>& draft_ids, const Buffer<int>& num_draft, const Buffer<int64_t>& keys,
                      const Buffer<int64_t>& positions) {
    if (s.batch * width * s.vocab_size > int64_t{1} << 29) return;
    std::vector<int64_t> out_rows;
    std::vector<float> temperature, top_p, min_p;
    std::vector<int> top_k;
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t slot = 0; slot <= num_draft_[b]; ++slot) {
        const Params& law = law_of(b);
        out_rows.push_back(b * width + slot);
        temperature.push_back(law.temperature), top_k.push_back(law.top_k);
        top_p.push_back(law.top_p), min_p.push_back(law.min_p);
      }
    }
    Buffer<int64_t> rows(out_rows);
    Buffer<float> t(temperature), p(top_p), m(min_p), probs(s.batch * width * s.vocab_size);
    Buffer<int> k(top_k);
    for (const int64_t task : {0, 1}) {
      require(equivtest_law_of_logits(logits.data, s.is_bfloat16, t.data, k.data, p.data, m.data, num_rows,
                                      s.vocab_size, rows.data, probs.data, task, row_refusal.data, nullptr));
    }
    require(cudaDeviceSynchronize());
    std::vector<float> law(s.vocab_size);
    for (const int64_t b : checked_) {
      expect_law(row_of(row_start_[b]).data(), s.vocab_size, law_of(b), law.data());
      const std::vector<float> written = probs.read(b * width * s.vocab_size, s.vocab_size);
      double error = 0;
      for (int64_t id = 0; id < s.vocab_size; ++id)
        error += std::fabs(static_cast<double>(law[id]) - written[id]) / 2;  // total variation
      law_error_ = std::max(law_error_, error);
      // A token at the cut may be kept by one and not by the other where the cut is within rounding: it weighs little
      // in a large vocabulary, and in a small one no law of the list comes near.
      failure_.expect(error < 1e-3, "law", b);
    }
    poison();
    require(equivtest_judge_probs(probs.data, draft_ids.data, num_draft.data, s.has_q ? q.data : nullptr, keys.data,
                                  positions.data, s.batch, s.max_draft, s.vocab_size, 0, row_tokens.data,
                                  row_accepts.data, row_refusal.data, nullptr));
    require(equivtest_put_out(draft_ids.data, num_draft.data, s.batch, s.max_draft, row_tokens.data, row_accepts.data,
                              row_refusal.data, tokens.data, emitted.data, telemetry.data, nullptr));
    require(cudaDeviceSynchronize());
    compare(false, &probs);
    if (s.max_draft == 0) {
      const auto drawn = tokens.read();
      poison();
      require(equivtest_judge_probs(probs.data, nullptr, nullptr, nullptr, keys.data, positions.data, s.batch, 0,
                                    s.vocab_size, 4, row_tokens.data, row_accepts.data, row_refusal.data, nullptr));
      require(cudaDeviceSynchronize());
      failure_.expect(row_tokens.read() == drawn, "sample draws other tokens than spec_accept", 0);
    }
    failure_.expect(row_refusal.read()[0] == ~0ull, "the plain contract refuses a good call", 0);
  }

  // A NaN at the end of the last row must be told, and be forgotten by the next call.
  template <class Accept>
  void refuse(const Accept& accept) {
    const int64_t last = logits.count - 1;
    const T kept = logits.read(last, 1)[0], bad = static_cast<T>(NAN);
    require(cudaMemcpy(logits.data + last, &bad, sizeof(T), cudaMemcpyHostToDevice));
    accept(false);
    const auto told = refusal.read();
    failure_.expect(told[0] == 1 && told[1] == static_cast<double>(num_rows - 1) && std::isnan(told[2]),
                    "a NaN is not told, or with another row", static_cast<int64_t>(told[1]));
    for (const int64_t token : tokens.read())
      failure_.expect(token >= -1 && token < s.vocab_size, "a token out of range, after a refusal", token);
    require(cudaMemcpy(logits.data + last, &kept, sizeof(T), cudaMemcpyHostToDevice));
    accept(false);
    failure_.expect(refusal.read()[0] == 0, "an earlier refusal is told again", 0);
  }

  Shape s;
  int64_t width;
  std::vector<int> num_draft_;
  std::vector<int64_t> row_start_;
  int64_t num_rows;
  Buffer<T> logits;
  Buffer<float> q;
  Buffer<int64_t> row_tokens;
  Buffer<int> row_accepts;
  Buffer<unsigned long long> row_refusal;
  Buffer<int64_t> tokens;
  Buffer<int> emitted, telemetry;
  Buffer<double> refusal;
  std::vector<int64_t> checked_, draft_ids_, keys_, positions_;
  Failure failure_;
  int64_t num_compared_ = 0, num_different_ = 0;
  double law_error_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const Shape few[] = {{1, 3, 2, true, false},   {2, 5, 1, false, true},     {31, 15, 3, true, false},
                       {1021, 4, 2, false, true}, {49152, 3, 1, true, false}, {151936, 2, 1, true, false}};
  const Shape many[] = {{1, 1, 0, true, false},        {1, 5, 3, false, true},       {2, 2048, 16, true, false},
                        {2, 33, 1, false, true},       {31, 2048, 16, true, false},  {31, 257, 5, false, true},
                        {1021, 300, 3, true, true},    {4097, 96, 4, false, false},  {8192, 30, 2, true, false},
                        {49152, 2048, 0, true, false}, {49152, 64, 7, true, false},  {49152, 16, 16, false, true},
                        {49153, 5, 2, true, false},    {151936, 1, 0, true, false},  {151936, 8, 7, true, false},
                        {151936, 64, 7, true, false},  {151936, 28, 3, false, true}, {262144, 1, 16, true, false},
                        {262144, 28, 1, false, false}, {262144, 14, 2, true, true}};
  const bool is_few = argc > 1 && std::strcmp(argv[1], "--few") == 0;
  std::vector<Shape> shapes(std::begin(many), std::end(many));
  if (is_few) shapes.assign(std::begin(few), std::end(few));
  int num_failed = 0;
  for (const Shape& shape : shapes) {
    num_failed += (shape.is_bfloat16 ? Stress<__nv_bfloat16>(shape).run() : Stress<float>(shape).run()) > 0;
    std::fflush(stdout);
  }
  std::printf("%d of %zu shapes failed\n", num_failed, shapes.size());
  return num_failed ? 1 : 0;
}
