#ifndef OPTSTATE_CLIENT_CTL_TABLE_H_
#define OPTSTATE_CLIENT_CTL_TABLE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace optstate::ctl {

struct Column {
  std::string title;
  bool right = false;
  bool wide_only = false;  // shown with -o wide alone
};

// Rows of text under titled columns, laid out by libsmartcols. Every row has a
// cell for each column. Threads: not thread-safe.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void AddRow(std::vector<std::string> cells) {
    rows_.push_back(std::move(cells));
  }
  bool empty() const { return rows_.empty(); }
  // Renders lines that end with '\n'; no line is cut, whatever the terminal's
  // width.
  absl::StatusOr<std::string> Render(bool wide) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_TABLE_H_
