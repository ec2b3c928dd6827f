#include "tests/simulation/report.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/types/os_error.h"
#include "tests/load/quantiles.h"

namespace optstate::simulation {
namespace {

using Row = std::vector<std::string>;

std::string Ms(double ms) { return absl::StrFormat("%.1f", ms); }

double MeanOf(const std::vector<uint64_t>& values) {
  if (values.empty()) return 0;
  return static_cast<double>(
             std::accumulate(values.begin(), values.end(), uint64_t{0})) /
         static_cast<double>(values.size());
}

Row RowOf(const Report& report) {
  const load::Quantiles attach = load::QuantilesOf(report.attach_ms);
  const load::Quantiles again = load::QuantilesOf(report.attach_again_ms);
  return {report.scenario,
          absl::StrCat(report.nodes),
          absl::StrCat(report.ranks),
          Ms(attach.p50_ms),
          Ms(attach.p99_ms),
          Ms(attach.max_ms),
          again.count == 0 ? "-" : Ms(again.p99_ms),
          absl::StrFormat("%.2f", report.cpu_ms_per_node),
          absl::StrCat(report.heap_bytes_per_node >> 10),
          absl::StrCat(report.file_bytes_per_node >> 10),
          absl::StrFormat("%.1f", MeanOf(report.log_lines)),
          absl::StrCat(report.log_lines_max()),
          absl::StrCat(report.steps),
          absl::StrFormat("%.2f", report.rounds_per_step)};
}

Row CsvRowOf(const Report& report) {
  const load::Quantiles attach = load::QuantilesOf(report.attach_ms);
  const load::Quantiles again = load::QuantilesOf(report.attach_again_ms);
  const auto number = [](double value) {
    return absl::StrFormat("%.17g", value);
  };
  return {report.scenario,
          absl::StrCat(report.seed),
          absl::StrCat(report.nodes),
          absl::StrCat(report.ranks),
          number(attach.p50_ms),
          number(attach.p99_ms),
          number(attach.max_ms),
          again.count == 0 ? "" : number(again.p99_ms),
          number(report.cpu_ms_per_node),
          absl::StrCat(report.heap_bytes_per_node),
          absl::StrCat(report.file_bytes_per_node),
          number(MeanOf(report.log_lines)),
          absl::StrCat(report.log_lines_max()),
          absl::StrCat(report.steps),
          number(report.rounds_per_step)};
}

}  // namespace

uint64_t Report::CountOf(const std::string& name) const {
  for (const auto& [known, count] : counts) {
    if (known == name) return count;
  }
  return 0;
}

uint64_t Report::log_lines_max() const {
  return log_lines.empty()
             ? 0
             : *std::max_element(log_lines.begin(), log_lines.end());
}

std::string TableOf(absl::Span<const Report> reports) {
  std::vector<Row> rows = {{"scenario", "nodes", "ranks", "attach p50 ms",
                            "p99", "max", "again p99", "CPU ms/node",
                            "heap KiB/node", "files KiB/node", "log lines/node",
                            "max", "steps", "rounds/step"}};
  for (const Report& report : reports) rows.push_back(RowOf(report));
  std::string text;
  for (size_t row = 0; row < rows.size(); ++row) {
    absl::StrAppend(&text, "| ", absl::StrJoin(rows[row], " | "), " |\n");
    if (row != 0) continue;
    for (size_t column = 0; column < rows[0].size(); ++column) {
      text += "|---";
    }
    text += "|\n";
  }
  for (const Report& report : reports) {
    absl::StrAppend(&text, "\n", report.scenario, ": seed ", report.seed,
                    ", trace ", absl::Hex(report.trace_hash, absl::kZeroPad16),
                    absl::StrFormat(", %.1f simulated s", report.simulated_s),
                    ", events ", report.events);
    for (const auto& [name, count] : report.counts) {
      absl::StrAppend(&text, ", ", name, " ", count);
    }
    text += "\n";
    for (const std::string& violation : report.violations) {
      absl::StrAppend(&text, "WRONG: ", violation, "\n");
    }
  }
  return text;
}

std::string CsvOf(absl::Span<const Report> reports) {
  std::string text =
      "scenario,seed,nodes,ranks,attach_p50_ms,attach_p99_ms,attach_max_ms,"
      "again_p99_ms,cpu_ms_per_node,heap_bytes_per_node,file_bytes_per_node,"
      "log_lines_mean,log_lines_max,steps,rounds_per_step\n";
  for (const Report& report : reports) {
    absl::StrAppend(&text, absl::StrJoin(CsvRowOf(report), ","), "\n");
  }
  return text;
}

absl::Status WriteText(const std::string& text, const std::string& path) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  // The library need not say why.
  return OsError(errno == 0 ? EIO : errno, absl::StrCat("write ", path));
}

}  // namespace optstate::simulation
