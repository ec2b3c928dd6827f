#include "client/ctl/table.h"

#include <libsmartcols/libsmartcols.h>

#include <cstdlib>
#include <memory>

#include "absl/status/status.h"

namespace optstate::ctl {
namespace {

struct Unref {
  void operator()(libscols_table* table) const { scols_unref_table(table); }
};

absl::Status OutOfMemory() {
  return absl::ResourceExhaustedError("table: out of memory");
}

}  // namespace

absl::StatusOr<std::string> Table::Render(bool wide) const {
  std::unique_ptr<libscols_table, Unref> table(scols_new_table());
  if (table == nullptr) return OutOfMemory();
  // Without this a table wider than the terminal is cut, or wrapped mid-word.
  scols_table_enable_nowrap(table.get(), 1);
  scols_table_set_termforce(table.get(), SCOLS_TERMFORCE_NEVER);
  for (const Column& column : columns_) {
    if (column.wide_only && !wide) continue;
    const int flags = column.right ? SCOLS_FL_RIGHT : 0;
    if (scols_table_new_column(table.get(), column.title.c_str(), 0, flags) ==
        nullptr) {
      return OutOfMemory();
    }
  }
  for (const std::vector<std::string>& row : rows_) {
    libscols_line* line = scols_table_new_line(table.get(), nullptr);
    if (line == nullptr) return OutOfMemory();
    size_t cell = 0;
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i].wide_only && !wide) continue;
      if (scols_line_set_data(line, cell++, row[i].c_str()) != 0) {
        return OutOfMemory();
      }
    }
  }
  char* text = nullptr;
  if (scols_print_table_to_string(table.get(), &text) != 0) {
    return OutOfMemory();
  }
  std::string rendered = text == nullptr ? "" : text;
  std::free(text);
  if (!rendered.empty() && rendered.back() != '\n') rendered += '\n';
  return rendered;
}

}  // namespace optstate::ctl
