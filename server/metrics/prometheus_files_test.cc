// Rules, dashboard and runbook of deploy/prometheus name what there is.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/metrics/metric_table.h"

namespace optstate::metrics {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string Read(const std::string& name) {
  std::ifstream stream("deploy/prometheus/" + name);
  EXPECT_TRUE(stream.good()) << name;
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

// The words of a text that begin as metrics do.
std::set<std::string> MetricsIn(absl::string_view text) {
  constexpr absl::string_view kPrefix = "optstate_";
  std::set<std::string> found;
  size_t begin = text.find(kPrefix);
  while (begin != absl::string_view::npos) {
    size_t end = begin;
    while (end < text.size() &&
           (absl::ascii_isalnum(text[end]) || text[end] == '_')) {
      ++end;
    }
    found.emplace(text.substr(begin, end - begin));
    begin = text.find(kPrefix, end);
  }
  return found;
}

// The names under which Prometheus has the metrics.
std::set<std::string> AllNames() {
  std::set<std::string> names;
  for (const MetricInfo& info : AllMetrics()) {
    names.insert(info.name);
    if (info.type != prometheus::MetricType::Histogram) continue;
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      names.insert(absl::StrCat(info.name, suffix));
    }
  }
  return names;
}

std::vector<std::string> AlertNames() {
  std::vector<std::string> alerts;
  for (const absl::string_view line :
       absl::StrSplit(Read("alerts.yaml"), '\n')) {
    constexpr absl::string_view kAlert = "- alert: ";
    const size_t begin = line.find(kAlert);
    if (begin == absl::string_view::npos) continue;
    alerts.emplace_back(line.substr(begin + kAlert.size()));
  }
  return alerts;
}

TEST(PrometheusFilesTest, MetricsOfRulesAndDashboardExist) {
  const std::set<std::string> names = AllNames();
  for (const char* file : {"alerts.yaml", "dashboard.json", "README.md"}) {
    const std::set<std::string> used = MetricsIn(Read(file));
    EXPECT_FALSE(used.empty()) << file;
    for (const std::string& metric : used) {
      EXPECT_TRUE(names.contains(metric)) << metric << " of " << file;
    }
  }
}

TEST(PrometheusFilesTest, EachAlertHasItsSectionInTheRunbook) {
  const std::vector<std::string> headings =
      absl::StrSplit(Read("README.md"), '\n');
  const std::string rules = Read("alerts.yaml");
  const std::vector<std::string> alerts = AlertNames();
  EXPECT_THAT(alerts, SizeIs(13));
  for (const std::string& alert : alerts) {
    EXPECT_THAT(headings, Contains("## " + alert));
    EXPECT_THAT(rules,
                HasSubstr(absl::StrCat("runbook: deploy/prometheus/README.md#",
                                       absl::AsciiStrToLower(alert), "\n")));
  }
}

TEST(PrometheusFilesTest, EachSectionOfTheRunbookHasItsAlert) {
  const std::vector<std::string> alerts = AlertNames();
  for (const absl::string_view line : absl::StrSplit(Read("README.md"), '\n')) {
    if (!absl::StartsWith(line, "## ")) continue;
    EXPECT_THAT(alerts, Contains(std::string(line.substr(3))));
  }
}

}  // namespace
}  // namespace optstate::metrics
