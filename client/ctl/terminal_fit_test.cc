#include "client/ctl/terminal_fit.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/unique_fd.h"
#include "proto/types/utf8.h"

namespace optstate::ctl {
namespace {

// Returns a head of two lines and a line for each job.
std::string Text(size_t jobs) {
  std::string text = "node\nJOB STEP\n";
  for (size_t i = 0; i < jobs; ++i) absl::StrAppend(&text, "job-", i, " 7\n");
  return text;
}

TEST(TerminalFitTest, AnUnknownSizeIsNoLimit) {
  EXPECT_EQ(FitToTerminal(Text(500), 2, {}), Text(500));
  EXPECT_EQ(FitToTerminal(Text(500), 2, {.rows = 0, .columns = 80}), Text(500));
}

TEST(TerminalFitTest, WhatHasRoomStays) {
  EXPECT_EQ(FitToTerminal(Text(3), 2, {.rows = 24, .columns = 80}), Text(3));
  // The cursor has the sixth row.
  EXPECT_EQ(FitToTerminal(Text(3), 2, {.rows = 6, .columns = 80}), Text(3));
}

TEST(TerminalFitTest, TheLastLineCountsTheJobsLeftOut) {
  EXPECT_EQ(FitToTerminal(Text(3), 2, {.rows = 5, .columns = 80}),
            "node\nJOB STEP\njob-0 7\nand 2 more jobs (optctl get jobs)\n");
  EXPECT_EQ(FitToTerminal(Text(300), 2, {.rows = 6}),
            "node\nJOB STEP\njob-0 7\njob-1 7\n"
            "and 298 more jobs (optctl get jobs)\n");
  EXPECT_EQ(FitToTerminal(Text(1), 2, {.rows = 3}),
            "node\nand 1 more job (optctl get jobs)\n");
}

TEST(TerminalFitTest, ATerminalOfOneRow) {
  for (const size_t rows : {1, 2}) {
    EXPECT_EQ(FitToTerminal(Text(4), 2, {.rows = rows}),
              "and 4 more jobs (optctl get jobs)\n");
    EXPECT_EQ(FitToTerminal("node\njobs\n", 2, {.rows = rows}), "node\n");
  }
}

TEST(TerminalFitTest, LinesAreCutToTheWidth) {
  EXPECT_EQ(FitToTerminal("node-7 1.2.3\nJOB\n", 2, {.rows = 24, .columns = 6}),
            "node-7\nJOB\n");
  EXPECT_EQ(FitToTerminal(Text(9), 2, {.rows = 5, .columns = 7}),
            "node\nJOB STE\njob-0 7\nand 8 m\n");
}

TEST(TerminalFitTest, CharactersStayWhole) {
  EXPECT_EQ(CutToWidth("größer", 3), "grö");
  EXPECT_EQ(CutToWidth("größer", 4), "größ");
  EXPECT_EQ(CutToWidth("größer", 6), "größer");
  // These are two columns wide.
  EXPECT_EQ(CutToWidth("模型a", 1), "");
  EXPECT_EQ(CutToWidth("模型a", 3), "模");
  EXPECT_EQ(CutToWidth("模型a", 5), "模型a");
  EXPECT_EQ(CutToWidth("a\xf0\x9f\x99\x82", 2), "a");
  EXPECT_EQ(CutToWidth("a", 0), "");
  // These bytes are no UTF-8; a character of three ends too early.
  EXPECT_EQ(CutToWidth("\xff\xfe\xe6\xa8", 3), "\xff\xfe\xe6");
}

TEST(TerminalFitTest, NothingIsTallerWiderOrTorn) {
  std::string text = "optstated on größer\n\nJOB 模型 STEP\n";
  for (int i = 0; i < 40; ++i)
    absl::StrAppend(&text, "模型-ö-", i, " 🙂 x\n");
  for (size_t rows = 1; rows < 50; ++rows) {
    for (size_t columns = 1; columns < 40; ++columns) {
      const std::string fit =
          FitToTerminal(text, 3, {.rows = rows, .columns = columns});
      ASSERT_TRUE(IsUtf8(fit)) << rows << " " << columns << ": " << fit;
      const std::vector<std::string> lines = absl::StrSplit(fit, '\n');
      ASSERT_LE(lines.size(), std::max<size_t>(rows, 2)) << fit;
      ASSERT_EQ(lines.back(), "");
      for (const std::string& line : lines) {
        ASSERT_EQ(CutToWidth(line, columns), line);
      }
      ASSERT_EQ(absl::StrContains(fit, "and "), rows < 44 && columns >= 4)
          << rows << " " << columns << ": " << fit;
    }
  }
}

TEST(TerminalFitTest, SizesOfTerminals) {
  const UniqueFd none(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(SizeOfTerminal(none.get()).rows, 0u);
  EXPECT_EQ(SizeOfTerminal(-1).columns, 0u);
  const UniqueFd terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!terminal.ok()) GTEST_SKIP() << "this machine gives no pseudo-terminals";
  winsize size = {};
  size.ws_row = 24;
  size.ws_col = 80;
  ASSERT_EQ(::ioctl(terminal.get(), TIOCSWINSZ, &size), 0);
  EXPECT_EQ(SizeOfTerminal(terminal.get()).rows, 24u);
  EXPECT_EQ(SizeOfTerminal(terminal.get()).columns, 80u);
}

}  // namespace
}  // namespace optstate::ctl
