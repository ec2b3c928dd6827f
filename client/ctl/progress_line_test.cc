#include "client/ctl/progress_line.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/strip.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

using ::testing::ElementsAre;

// This byte ends what is read from a terminal.
constexpr char kEnd = '\x04';

// Returns what stands on a terminal that was sent this text, line by line. It
// knows what ProgressLine uses: \r, \n, and the sequence that clears the rest
// of a line. Other text stands over what was there.
std::vector<std::string> ScreenOf(absl::string_view text) {
  std::vector<std::string> lines(1);
  size_t column = 0;
  while (!text.empty()) {
    if (absl::ConsumePrefix(&text, "\033[K")) {
      lines.back().resize(column);
      continue;
    }
    const char byte = text[0];
    text.remove_prefix(1);
    if (byte == '\r') {
      column = 0;
    } else if (byte == '\n') {
      lines.emplace_back();
      column = 0;
    } else {
      if (column == lines.back().size()) lines.back().push_back(' ');
      lines.back()[column++] = byte;
    }
  }
  return lines;
}

// Each test runs for stdout and for stderr. A pseudo-terminal is in its place
// while the line is shown.
class ProgressLineTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    master_ = UniqueFd(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    if (!master_.ok()) {
      GTEST_SKIP() << "this machine gives no pseudo-terminals";
    }
    ASSERT_EQ(::grantpt(master_.get()), 0);
    ASSERT_EQ(::unlockpt(master_.get()), 0);
    terminal_ = UniqueFd(
        ::open(::ptsname(master_.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_TRUE(terminal_.ok());
    // Nothing is added to what is written.
    termios settings = {};
    ASSERT_EQ(::tcgetattr(terminal_.get(), &settings), 0);
    ::cfmakeraw(&settings);
    ASSERT_EQ(::tcsetattr(terminal_.get(), TCSANOW, &settings), 0);
  }

  void SetColumns(uint16_t columns) const {
    winsize size = {};
    size.ws_row = 5;
    size.ws_col = columns;
    ASSERT_EQ(::ioctl(terminal_.get(), TIOCSWINSZ, &size), 0);
  }

  // Returns what arrives at the terminal.
  std::string Shown(bool is_silent,
                    const std::function<void(ProgressLine&)>& show) {
    std::fflush(stdout);
    const UniqueFd saved(::dup(GetParam()));
    EXPECT_TRUE(saved.ok());
    EXPECT_EQ(::dup2(terminal_.get(), GetParam()), GetParam());
    {
      ProgressLine line(is_silent, GetParam());
      show(line);
    }
    EXPECT_EQ(::dup2(saved.get(), GetParam()), GetParam());
    if (::write(terminal_.get(), &kEnd, 1) != 1) return "nothing to be read";
    std::string text;
    char byte = 0;
    while (::read(master_.get(), &byte, 1) == 1 && byte != kEnd) text += byte;
    return text;
  }

 private:
  UniqueFd master_;
  UniqueFd terminal_;
};

TEST_P(ProgressLineTest, EachProgressIsInThePlaceOfTheLast) {
  const std::string text = Shown(false, [](ProgressLine& line) {
    line.Show("", "0 of 9");
    line.Show("", "5 of 9");
    line.Show("", "9 of 9");
  });
  EXPECT_EQ(text, "\r\033[K0 of 9\r\033[K5 of 9\r\033[K9 of 9");
  EXPECT_THAT(ScreenOf(text), ElementsAre("9 of 9"));
}

TEST_P(ProgressLineTest, NothingIsLeftOfALongerText) {
  EXPECT_THAT(ScreenOf(Shown(false,
                             [](ProgressLine& line) {
                               line.Show("", "copied 10 of 100 GiB, 9 s left");
                               line.Show("", "copied");
                             })),
              ElementsAre("copied"));
  EXPECT_THAT(ScreenOf(Shown(false,
                             [](ProgressLine& line) {
                               line.Show("", "copied 10 of 100 GiB, 9 s left");
                               line.Show("", "");
                             })),
              ElementsAre(""));
}

TEST_P(ProgressLineTest, ALineIsCutWhereTheTerminalEnds) {
  SetColumns(10);
  const std::string text = Shown(false, [](ProgressLine& line) {
    line.Show("lines that stay are whole\n", "0123456789012345");
    line.Show("", "new");
  });
  EXPECT_EQ(text, "\r\033[Klines that stay are whole\n0123456789\r\033[Knew");
}

TEST_P(ProgressLineTest, WholeLinesStayAboveTheProgress) {
  EXPECT_THAT(ScreenOf(Shown(false,
                             [](ProgressLine& line) {
                               line.Show("", "a long progress");
                               line.Show("one\ntwo\n", "half");
                               line.Show("three\n", "all");
                             })),
              ElementsAre("one", "two", "three", "all"));
}

TEST_P(ProgressLineTest, TheEndTakesThePlaceOfTheProgress) {
  absl::Status told = absl::UnknownError("not told");
  const std::string text = Shown(false, [&told](ProgressLine& line) {
    line.Show("", "9 of 9, 0 s left");
    told = line.End("done\n");
  });
  EXPECT_TRUE(told.ok()) << told;
  EXPECT_EQ(text, "\r\033[K9 of 9, 0 s left\r\033[Kdone\n");
  EXPECT_THAT(ScreenOf(text), ElementsAre("done", ""));
}

TEST_P(ProgressLineTest, AnEndWithoutTextClearsTheLine) {
  const std::string text = Shown(false, [](ProgressLine& line) {
    line.Show("", "9 of 9");
    EXPECT_TRUE(line.End("").ok());
  });
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_THAT(ScreenOf(text), ElementsAre(""));
}

TEST_P(ProgressLineTest, ASilentLineShowsNothing) {
  EXPECT_EQ(Shown(true,
                  [](ProgressLine& line) {
                    line.Show("one\n", "half");
                    EXPECT_TRUE(line.End("done\n").ok());
                  }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Streams, ProgressLineTest,
                         testing::Values(STDOUT_FILENO, STDERR_FILENO),
                         [](const auto& stream) {
                           return stream.param == STDOUT_FILENO ? "Stdout"
                                                                : "Stderr";
                         });

}  // namespace
}  // namespace optstate::ctl
