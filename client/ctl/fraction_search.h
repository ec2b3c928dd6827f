#ifndef OPTSTATE_CLIENT_CTL_FRACTION_SEARCH_H_
#define OPTSTATE_CLIENT_CTL_FRACTION_SEARCH_H_

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace optstate::ctl {

// Proposes fractions of elements for the CPU, and learns how long updates with
// them take.
//
// An update by the CPU and devices takes about
// max(fraction * cpu, (1 - fraction) * devices), where `cpu` and `devices` are
// the times of each alone. So these two are measured first, then the fraction
// where both would end together, then what is beside the fastest one, ever
// nearer: what a link or the memory that both use takes is not in the formula.
// The search of the Python package (fraction_search.py) is the same.
class FractionSearch {
 public:
  // The first steps with a fraction fill buffers and move records, and do not
  // count: of records that stay on devices each step brings a fourth up to
  // date, with what they lack since. The fastest of the steps behind them does.
  static constexpr size_t kSettlingSteps = 4;
  static constexpr size_t kMeasuredSteps = 2;
  static constexpr size_t kTriedMax = 12;

  // The fraction that the next step is to have; the fastest one in the end.
  double fraction() const { return fraction_; }
  bool is_over() const { return is_over_; }

  // Takes the time of an update with fraction(), which changes when it is known
  // well.
  void Note(double seconds);

  size_t tried() const { return times_.size(); }
  // Returns the fastest fraction so far, of equal ones the first, which is the
  // CPU alone; nothing before one is known.
  std::optional<double> best() const;
  // Returns the time of a fraction; nothing: it was not tried.
  std::optional<double> SecondsOf(double fraction) const;

 private:
  std::optional<double> Following();

  double fraction_ = 1;
  bool is_over_ = false;
  std::vector<std::pair<double, double>> times_;  // fraction, seconds
  std::vector<double> taken_;                     // with the present fraction
  double reach_ = 0.1;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_FRACTION_SEARCH_H_
