#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/interrupt.h"
#include "client/ctl/terminal_fit.h"
#include "client/ctl/top_view.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

struct TopOptions {
  double interval_s = 1;
  uint32_t count = 0;  // 0: until Ctrl-C
};

// Goes to the beginning of the terminal's screen, and clears what follows.
constexpr char kClear[] = "\033[H\033[J";

absl::Status Run(const Context& context, const TopOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(const Interrupt interrupt, Interrupt::Install());
  const bool clears = ::isatty(STDOUT_FILENO) != 0;
  std::optional<TopSample> before;
  for (uint32_t shown = 0; options.count == 0 || shown < options.count;
       ++shown) {
    if (shown > 0 && interrupt.Await(absl::Seconds(options.interval_s))) break;
    // Each time anew, so that a daemon that was restarted is found again.
    OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
    TopSample now;
    OPTSTATE_ASSIGN_OR_RETURN(now.status, client->GetStatus());
    OPTSTATE_ASSIGN_OR_RETURN(now.jobs, client->ListJobs());
    now.at = absl::Now();
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::string text,
        RenderTop(before.has_value() ? &*before : nullptr, now,
                  context.format == OutputFormat::kWide,
                  SizeOfTerminal(STDOUT_FILENO)));
    OPTSTATE_RETURN_IF_ERROR(Write(absl::StrCat(clears      ? kClear
                                                : shown > 0 ? "\n"
                                                            : "",
                                                text)));
    before = std::move(now);
  }
  return absl::OkStatus();
}

std::string CheckInterval(const std::string& text) {
  double s = 0;
  if (absl::SimpleAtod(text, &s) && s >= 0.1 && s <= 3600) return "";
  return absl::StrCat(text, " is not from 0.1 to 3600 seconds");
}

}  // namespace

void AddTopCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "top",
      "Shows again and again what every job does: steps a second, time by "
      "phase, share of the memory bandwidth, disk; -o wide for more. Ctrl-C "
      "ends it. For scripts: get jobs -o json");
  auto options = std::make_shared<TopOptions>();
  command
      ->add_option("--interval", options->interval_s,
                   "Seconds from one look to the next (1)")
      ->check(CLI::Validator(CheckInterval, "SECONDS"));
  command->add_option("--count", options->count,
                      "Ends after so many looks; 0: does not (0)");
  command->callback([&context, options] {
    context.run = [&context, options]() -> absl::Status {
      if (context.machine_readable()) {
        return absl::InvalidArgumentError(
            "top is for people: for scripts there is `optctl get jobs -o "
            "json`, "
            "whose counters grow");
      }
      return Run(context, *options);
    };
  });
}

}  // namespace optstate::ctl
