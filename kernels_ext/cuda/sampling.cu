// The sampling ops: a block a row decides and draws all that the row may be asked for, where few rows leave
// multiprocessors idle with the help of others, and a second, tiny kernel puts the rows of each request together.
//
// Every coin depends on (stream, position, purpose) alone, so a row need not wait for the ones before it: it accepts
// its draft or not, and where its own coin rejects it draws the recovered token that is put out if no earlier row
// rejects. Source of the chain rule: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
#include <algorithm>

#include "sampling.cuh"

namespace equivtest::cuda {
namespace {

constexpr size_t kSharedBytes = sizeof(float) * kCapacity + sizeof(int) * kCapacity;

enum class Rule : int { kChain, kMatch, kSample };

struct Laws {
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;

  __device__ RowLaw at(int64_t i) const { return {temperature[i], top_p[i], min_p[i], top_k[i]}; }
};

struct Requests {
  const int64_t* draft_token_ids;  // [batch, max_draft]
  const int* num_draft;            // [batch]
  const float* draft_probs;        // [batch, max_draft, vocab_size]; null: point mass at each draft
  const int64_t* keys;             // [batch]
  const int64_t* positions;        // [batch]
  int max_draft;
  Rule rule;
  Purpose purpose;  // of the coins of kSample
};

struct RowResults {
  int64_t* tokens;  // [batch * (max_draft + 1)]: what the row puts out if the text ends its round there; -1 for nothing
  int* accepts;     // the same: whether its own coin keeps its draft
  unsigned long long* refusal;
};

// What is asked of one row, of a grid [batch, max_draft + 1]. Read in one go and early: otherwise each of these would be
// waited for in turn.
struct Question {
  int64_t request, place, key, position;
  int64_t draft;  // -1: none
  int slot, num_draft;

  __device__ explicit Question(const Requests& requests)
      : request(blockIdx.x),
        place(request * (requests.max_draft + 1) + blockIdx.y),
        key(requests.keys[request]),
        position(requests.positions[request] + blockIdx.y),
        draft(-1),
        slot(blockIdx.y),
        num_draft(requests.num_draft ? requests.num_draft[request] : 0) {
    if (slot < requests.max_draft && requests.draft_token_ids) {
      draft = requests.draft_token_ids[request * requests.max_draft + slot];
    }
  }

  // Drafts of the request; what is out of range is refused elsewhere.
  __device__ int count(const Requests& requests) const { return max(0, min(num_draft, requests.max_draft)); }
};

__device__ void toss_coins(const Question& question, Shared& shared) {
  if (threadIdx.x < 8) {
    shared.coins[threadIdx.x] = uniform(question.key, question.position, static_cast<Purpose>(threadIdx.x));
  }
}

// Decides about one row, whose coins are tossed. All threads of the block call it together.
template <class T, class Weight>
__device__ void judge(const Items<T>& items, const Weight& weight, const T* row, int vocab_size,
                      const Question& question, int64_t named_row, const Requests& requests, const RowResults& results,
                      Shared& shared) {
  const int num_draft = question.count(requests), slot = question.slot;
  const int64_t request = question.request, place = question.place, draft = question.draft;
  const bool has_draft = slot < num_draft;
  if (has_draft && (draft < 0 || draft >= vocab_size)) {
    if (threadIdx.x == 0) {
      refuse(results.refusal, named_row, kBadDraftId, static_cast<float>(draft));
      results.tokens[place] = 0, results.accepts[place] = 0;
    }
    return;
  }
  const auto coin = [&](Purpose purpose) { return shared.coins[static_cast<int>(purpose)]; };
  auto of = [&](int i) { return static_cast<double>(weight(items.x(i))); };
  int64_t token = -1, without = -1;  // the latter is not drawn
  double u = 0;
  bool accepted = false, refused = false;
  if (requests.rule == Rule::kChain && has_draft) {
    const float p = weight.probability(to_float(row[draft]));
    const float* q_row =
        requests.draft_probs ? requests.draft_probs + (request * requests.max_draft + slot) * vocab_size : nullptr;
    const float q = q_row ? q_row[draft] : 1.0f;
    const Problem problem = !(p >= 0 && p < kInfinity)   ? kBadProbability
                            : !(q >= 0 && q < kInfinity) ? kBadDraftProbability
                                                         : kNoProblem;
    if (problem != kNoProblem) {
      if (threadIdx.x == 0) refuse(results.refusal, named_row, problem, problem == kBadProbability ? p : q);
      refused = true;
    } else {
      accepted = coin(Purpose::kAccept) * static_cast<double>(q) < static_cast<double>(p);
      u = coin(Purpose::kRecover);
      if (!accepted && q_row) {
        token = draw(
            items, u,
            [&](int i) {
              const double left = static_cast<double>(weight.probability(items.x(i))) - q_row[items.id(i)];
              return left > 0 ? left : 0.0;
            },
            shared);
      } else if (!accepted) {
        without = draft;
      }
    }
  } else {
    u = coin(requests.rule == Rule::kSample  ? requests.purpose
             : requests.rule == Rule::kMatch ? Purpose::kPlain
             : num_draft == 0                ? Purpose::kPlain
                                             : Purpose::kBonus);
  }
  // Rounding alone can leave the residual empty: p <= q everywhere, and yet the coin rejected. Then all may be drawn.
  while (token < 0 && !accepted && !refused) {
    token = draw(items, u, [&](int i) { return items.id(i) == without ? 0.0 : of(i); }, shared);
    if (without < 0) break;
    without = -1;
  }
  if (!(requests.rule == Rule::kChain && has_draft)) accepted = has_draft && token == draft;
  if (threadIdx.x == 0) {
    results.tokens[place] = refused ? 0 : token;
    results.accepts[place] = accepted;
  }
}

// A grid [batch, max_draft + 1, cluster]: the blocks of a cluster read a row, and the first of them decides.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    judge_logits(const T* logits, int64_t num_rows, const int* row_start, Laws laws, int vocab_size,
                 Requests requests, RowResults results) {
  extern __shared__ char memory[];
  __shared__ Shared shared;
  allow_next_launch();
  wait_for_previous();
  const Cluster cluster{static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)};
  const Question question(requests);
  const int first_row = row_start[question.request];
  const RowLaw law = laws.at(question.request);
  const int64_t index = static_cast<int64_t>(first_row) + question.slot;
  const bool counts = question.num_draft >= 0 && question.num_draft <= requests.max_draft;
  const bool is_first = cluster.rank == 0 && threadIdx.x == 0;
  // One condition of both numbers: the compiler would wait for the one before it asks for the other.
  const bool asked = question.slot <= question.count(requests), there = (index >= 0) & (index < num_rows);
  if (!(asked & counts & there)) {
    if (asked && is_first) {
      refuse(results.refusal, question.request, kBadRows, static_cast<float>(counts ? first_row : question.num_draft));
      results.tokens[question.place] = 0, results.accepts[question.place] = 0;
    }
    return;
  }
  const T* row = logits + index * vocab_size;
  float* gathered_x = reinterpret_cast<float*>(memory);
  LogitRow<T> law_row(row, vocab_size, cluster, shared, gathered_x, reinterpret_cast<int*>(gathered_x + kCapacity));
  toss_coins(question, shared);  // while the row is on its way
  float value = law.temperature;
  const Problem problem = law.is_valid() ? law_row.read(law, &value) : kBadParams;
  if (cluster.rank != 0) return;
  if (problem != kNoProblem) {
    if (is_first) {
      refuse(results.refusal, index, problem, value);
      results.tokens[question.place] = 0, results.accepts[question.place] = 0;
    }
    return;
  }
  if (law.temperature == 0) {  // greedy: a point mass, one item of weight 1
    __shared__ float x;
    __shared__ int id;
    const int best = law_row.best_id();
    if (threadIdx.x == 0) x = law_row.weight().max, id = best;
    __syncthreads();
    struct Point {
      int64_t draft, best;
      __device__ float operator()(float) const { return 1.0f; }
      __device__ float probability(float) const { return draft == best ? 1.0f : 0.0f; }
    };
    const int64_t draft = question.slot < question.num_draft ? question.draft : best;
    const Items<T> one{row, &x, &id, 1, false};
    // A recovered token with a real q: the residual of a point mass is at the best token or nowhere.
    Requests sure = requests;
    if (draft != best) sure.draft_probs = nullptr;
    judge(one, Point{draft, best}, row, vocab_size, question, index, sure, results, shared);
    return;
  }
  law_row.filter(law);
  judge(law_row.items(), law_row.weight(), row, vocab_size, question, index, requests, results, shared);
}

__global__ void __launch_bounds__(kThreads, 1)
    judge_probs(const float* target_probs, int vocab_size, Requests requests, RowResults results) {
  __shared__ Shared shared;
  const Question question(requests);
  if (requests.num_draft && question.slot > question.count(requests)) return;
  toss_coins(question, shared);
  __syncthreads();
  const float* row = target_probs + question.place * vocab_size;
  const Items<float> items{row, nullptr, nullptr, vocab_size, true};
  judge(items, PlainWeight{}, row, vocab_size, question, question.request, requests, results, shared);
}

// Refuses the row that a request draws from, the first that its coins reject or its last one, where that does not hold
// probabilities. The rows after it are nobody's: whatever they hold is fine.
__global__ void __launch_bounds__(kThreads, 1)
    check_probs(const float* probs, int vocab_size, int rows_each, int max_draft, const int* num_draft,
                Problem problem, RowResults results) {
  const int64_t request = blockIdx.x;
  const int64_t first = request * (max_draft + 1);
  const int count = num_draft ? max(0, min(num_draft[request], max_draft)) : 0;
  int slot = 0;
  while (slot < count && results.accepts[first + slot]) ++slot;
  if (problem == kBadDraftProbability && slot == count) return;
  const float* row = probs + (request * rows_each + slot) * vocab_size;
  for (int i = threadIdx.x; i < vocab_size; i += kThreads) {
    if (!(row[i] >= 0 && row[i] < kInfinity)) refuse(results.refusal, request, problem, row[i]);
  }
  if (threadIdx.x == 0 && results.tokens[first + slot] < 0) refuse(results.refusal, request, kNoMass, 0.0f);
}

enum class Task : int { kCheck, kWrite };

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    law_of_logits(const T* logits, Laws laws, int vocab_size, const int64_t* out_rows, float* out, Task task,
                  unsigned long long* refusal) {
  extern __shared__ char memory[];
  __shared__ Shared shared;
  const int64_t index = blockIdx.x;
  const T* row = logits + index * vocab_size;
  float* gathered_x = reinterpret_cast<float*>(memory);
  LogitRow<T> law_row(row, vocab_size, Cluster{0, 1}, shared, gathered_x,
                      reinterpret_cast<int*>(gathered_x + kCapacity));
  const RowLaw law = laws.at(index);
  float value;
  const Problem problem = law_row.read(law, &value);
  if (task == Task::kCheck) {
    if (problem != kNoProblem && threadIdx.x == 0) refuse(refusal, index, problem, value);
    return;
  }
  float* target = out + (out_rows ? out_rows[index] : index) * vocab_size;
  if (law.temperature == 0) {
    const int best = law_row.best_id();
    for (int i = threadIdx.x; i < vocab_size; i += kThreads) target[i] = i == best ? 1.0f : 0.0f;
    return;
  }
  law_row.filter(law);
  const LogitWeight weight = law_row.weight();
  const float scale = static_cast<float>(1.0 / weight.norm);
  for (int i = threadIdx.x; i < vocab_size; i += kThreads) target[i] = weight(to_float(row[i])) * scale;
}

// The tokens of each request: the drafts before the first rejection, what that row drew, -1 after it. A thread a place:
// reading one's neighbours again costs less than waiting for them in turn.
__global__ void combine(const int64_t* draft_token_ids, const int* num_draft, RowResults results, int batch,
                        int max_draft, int64_t* output_token_ids, int* emitted, int* telemetry, double* refusal) {
  allow_next_launch();
  wait_for_previous();
  const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place == 0 && refusal != nullptr) {
    const unsigned long long bits = *results.refusal;
    const bool refused = bits != ~0ull;
    refusal[0] = refused ? static_cast<double>(bits >> 32 & 0xff) : 0.0;
    refusal[1] = refused ? static_cast<double>(bits >> 40) : 0.0;
    refusal[2] = refused ? static_cast<double>(__uint_as_float(static_cast<uint32_t>(bits))) : 0.0;
    *results.refusal = ~0ull;
  }
  const int64_t request = place / (max_draft + 1);
  if (request >= batch) return;
  const int slot = place % (max_draft + 1);
  const int64_t drawn = results.tokens[place];
  const int64_t draft = slot < max_draft ? draft_token_ids[request * max_draft + slot] : -1;
  const int count = max(0, min(num_draft ? num_draft[request] : 0, max_draft));
  int prefix = 0, kept = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    const int accepts = results.accepts[place - slot + i];
    if (prefix == i) prefix += accepts;
    kept += accepts;
  }
  output_token_ids[place] = slot < prefix ? draft : slot == prefix ? drawn : -1;
  if (slot == 0) emitted[request] = prefix, telemetry[request] = kept;
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Shared memory above 48 KB has to be asked for, once a kernel and device.
template <class Kernel>
const char* allow_shared(Kernel kernel) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// How many blocks read a row together: a power of two, so many as find an idle multiprocessor each and two rounds of
// vectors or more.
template <class T>
unsigned blocks_of_a_row(int64_t num_rows, int64_t vocab_size) {
  if (!is_sm_90()) return 1;
  const int64_t rounds = vocab_size / (16 / static_cast<int64_t>(sizeof(T))) / kThreads;
  const int64_t most = std::min(device_attribute(cudaDevAttrMultiProcessorCount) / num_rows, rounds / 2);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <class T>
const char* launch_judge(const void* logits, int64_t num_rows, const int* row_start, const Laws& laws,
                         int64_t vocab_size, int64_t batch, const Requests& requests, const RowResults& results,
                         cudaStream_t stream) {
  if (const char* error = allow_shared(judge_logits<T>)) return error;
  const unsigned cluster = blocks_of_a_row<T>(batch * (requests.max_draft + 1), vocab_size);
  const dim3 grid(static_cast<unsigned>(batch), static_cast<unsigned>(requests.max_draft + 1), cluster);
  return launch_clusters(judge_logits<T>, grid, cluster, kThreads, kSharedBytes, stream, static_cast<const T*>(logits),
                         num_rows, row_start, laws, static_cast<int>(vocab_size), requests, results);
}

template <class T>
const char* launch_law(const void* logits, const Laws& laws, int64_t vocab_size, int64_t num_rows,
                       const int64_t* out_rows, float* out, Task task, unsigned long long* refusal,
                       cudaStream_t stream) {
  if (const char* error = allow_shared(law_of_logits<T>)) return error;
  law_of_logits<T><<<static_cast<unsigned>(num_rows), kThreads, kSharedBytes, stream>>>(
      static_cast<const T*>(logits), laws, static_cast<int>(vocab_size), out_rows, out, task, refusal);
  return last_error();
}

const char* launch_combine(const int64_t* drafts, const int* num_draft, const RowResults& results, int64_t batch,
                           int64_t max_draft, int64_t* output, int* emitted, int* telemetry, double* refusal,
                           cudaStream_t stream) {
  const int64_t places = batch * (max_draft + 1);
  return launch(combine, static_cast<unsigned>((places + 127) / 128), 128, 0, stream, drafts, num_draft, results,
                static_cast<int>(batch), static_cast<int>(max_draft), output, emitted, telemetry, refusal);
}

}  // namespace
}  // namespace equivtest::cuda

using namespace equivtest::cuda;

extern "C" {

// accept_logits of the contract: rule 0 is the chain, 1 is match.
const char* equivtest_accept_logits(const void* logits, int64_t is_bfloat16, int64_t num_rows, const int* row_start,
                                    const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                                    const int64_t* draft_token_ids, const int* num_draft, const float* draft_probs,
                                    const int64_t* keys, const int64_t* positions, int64_t batch, int64_t max_draft,
                                    int64_t vocab_size, int64_t rule, int64_t* row_tokens, int* row_accepts,
                                    unsigned long long* row_refusal, int64_t* output_token_ids, int* emitted,
                                    int* telemetry, double* refusal, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Laws laws{temperature, top_k, top_p, min_p};
  const Requests requests{draft_token_ids, num_draft, draft_probs, keys, positions, static_cast<int>(max_draft),
                          rule == 0 ? Rule::kChain : Rule::kMatch, equivtest::Purpose::kPlain};
  const RowResults results{row_tokens, row_accepts, row_refusal};
  const auto judge = is_bfloat16 ? launch_judge<__nv_bfloat16> : launch_judge<float>;
  if (const char* error = judge(logits, num_rows, row_start, laws, vocab_size, batch, requests, results, on)) return error;
  return launch_combine(draft_token_ids, num_draft, results, batch, max_draft, output_token_ids, emitted, telemetry,
                        refusal, on);
}

// What verify_probs refuses (task 0), or the laws themselves (task 1).
const char* equivtest_law_of_logits(const void* logits, int64_t is_bfloat16, const float* temperature,
                                    const int* top_k, const float* top_p, const float* min_p, int64_t num_rows,
                                    int64_t vocab_size, const int64_t* out_rows, float* out, int64_t task,
                                    unsigned long long* row_refusal, void* stream) {
  const Laws laws{temperature, top_k, top_p, min_p};
  const auto launch = is_bfloat16 ? launch_law<__nv_bfloat16> : launch_law<float>;
  return launch(logits, laws, vocab_size, num_rows, out_rows, out, static_cast<Task>(task), row_refusal,
                static_cast<cudaStream_t>(stream));
}

// The first half of spec_accept (num_draft given: the chain) and of sample (null: coins of `purpose`): rows decided
// and checked, nothing put out.
const char* equivtest_judge_probs(const float* target_probs, const int64_t* draft_token_ids, const int* num_draft,
                                  const float* draft_probs, const int64_t* keys, const int64_t* positions,
                                  int64_t batch, int64_t max_draft, int64_t vocab_size, int64_t purpose,
                                  int64_t* row_tokens, int* row_accepts, unsigned long long* row_refusal,
                                  void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Requests requests{draft_token_ids, num_draft, draft_probs, keys, positions, static_cast<int>(max_draft),
                          num_draft ? Rule::kChain : Rule::kSample, static_cast<equivtest::Purpose>(purpose)};
  const RowResults results{row_tokens, row_accepts, row_refusal};
  const dim3 rows(static_cast<unsigned>(batch), static_cast<unsigned>(max_draft + 1));
  judge_probs<<<rows, kThreads, 0, on>>>(target_probs, static_cast<int>(vocab_size), requests, results);
  const auto check = [&](const float* probs, int64_t rows_each, Problem problem) {
    check_probs<<<static_cast<unsigned>(batch), kThreads, 0, on>>>(probs, static_cast<int>(vocab_size),
                                                                   static_cast<int>(rows_each), requests.max_draft,
                                                                   num_draft, problem, results);
  };
  check(target_probs, max_draft + 1, kBadProbability);
  if (draft_probs != nullptr) check(draft_probs, max_draft, kBadDraftProbability);
  return last_error();
}

// The second half.
const char* equivtest_put_out(const int64_t* draft_token_ids, const int* num_draft, int64_t batch, int64_t max_draft,
                              int64_t* row_tokens, int* row_accepts, unsigned long long* row_refusal,
                              int64_t* output_token_ids, int* emitted, int* telemetry, void* stream) {
  return launch_combine(draft_token_ids, num_draft, RowResults{row_tokens, row_accepts, row_refusal}, batch, max_draft,
                        output_token_ids, emitted, telemetry, nullptr, static_cast<cudaStream_t>(stream));
}
}
