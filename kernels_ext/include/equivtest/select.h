// Weighted selection without sorting: the cut of a filter among candidate tokens.
#pragma once

#include <cstdint>
#include <utility>

namespace equivtest {

struct Candidate {
  float z;
  float e;  // exp(z - max z)
};

struct UnitWeight {
  double operator()(const Candidate&) const { return 1.0; }
};

struct MassWeight {
  double operator()(const Candidate& candidate) const { return candidate.e; }
};

// The largest z in `items` with weight{items with z >= it} >= target; the smallest z when no item reaches it.
//
// Three-way quickselect with a median-of-three pivot: expected linear, and one step on a flat row. Reorders `items`.
template <class Weight>
float weighted_cut(Candidate* items, int64_t count, double target, Weight weight) {
  int64_t begin = 0, end = count;
  double above = 0;  // weight of what is known to be larger than items[begin, end)
  for (;;) {
    const float a = items[begin].z, b = items[begin + (end - begin) / 2].z, c = items[end - 1].z;
    const float pivot = a < b ? (b < c ? b : (a < c ? c : a)) : (a < c ? a : (b < c ? c : b));
    int64_t larger = begin, next = begin, smaller = end;  // [begin, larger) > pivot, [larger, next) ==, [smaller, end) <
    double weight_larger = 0, weight_equal = 0;
    while (next < smaller) {
      const Candidate item = items[next];
      if (item.z > pivot) {
        weight_larger += weight(item);
        std::swap(items[larger++], items[next++]);
      } else if (item.z < pivot) {
        std::swap(items[next], items[--smaller]);
      } else {
        weight_equal += weight(item);
        ++next;
      }
    }
    if (larger > begin && above + weight_larger >= target) {
      end = larger;
      continue;
    }
    above += weight_larger + weight_equal;
    if (above >= target || smaller == end) return pivot;
    begin = smaller;
  }
}

}  // namespace equivtest
