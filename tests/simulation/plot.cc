#include "tests/simulation/plot.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace optstate::simulation {
namespace {

// Pixels of a panel, and of the space around its axes.
constexpr double kPanelWidth = 460;
constexpr double kPanelHeight = 220;
constexpr double kLeft = 60;
constexpr double kTop = 40;
constexpr double kRight = 20;
constexpr double kBottom = 45;
// Points of a curve: enough for its shape, and few for a small file.
constexpr size_t kPointsMax = 200;

struct Panel {
  std::string title;
  std::string unit;
  std::string share;  // the label of the other axis
  std::vector<double> values;
};

// Returns a number of pixels or a value of an axis.
std::string Number(double value) { return absl::StrFormat("%.6g", value); }

void AppendText(double x, double y, absl::string_view anchor,
                absl::string_view text, std::string* svg) {
  absl::StrAppend(svg, "<text x=\"", Number(x), "\" y=\"", Number(y),
                  "\" text-anchor=\"", anchor, "\">", text, "</text>\n");
}

void AppendLine(double x1, double y1, double x2, double y2, std::string* svg) {
  absl::StrAppend(svg, "<line x1=\"", Number(x1), "\" y1=\"", Number(y1),
                  "\" x2=\"", Number(x2), "\" y2=\"", Number(y2), "\"/>\n");
}

// Draws the cumulative distribution of the values, with its corner at (x, y).
void AppendPanel(const Panel& panel, double x, double y, std::string* svg) {
  const double left = x + kLeft;
  const double top = y + kTop;
  const double width = kPanelWidth - kLeft - kRight;
  const double height = kPanelHeight - kTop - kBottom;
  AppendText(x + kPanelWidth / 2, y + 20, "middle", panel.title, svg);
  AppendLine(left, top + height, left + width, top + height, svg);
  AppendLine(left, top, left, top + height, svg);
  std::vector<double> sorted = panel.values;
  std::sort(sorted.begin(), sorted.end());
  const double most = sorted.empty() ? 0 : sorted.back();
  const double scale = most > 0 ? width / most : 0;
  for (int tick = 0; tick <= 4; ++tick) {
    const double part = tick / 4.0;
    AppendText(left + part * width, top + height + 16, "middle",
               absl::StrFormat("%.4g", part * most), svg);
    AppendText(left - 6, top + height - part * height + 4, "end",
               absl::StrFormat("%d%%", 25 * tick), svg);
  }
  AppendText(left + width / 2, top + height + 34, "middle", panel.unit, svg);
  AppendText(left + 4, top - 4, "start", panel.share, svg);
  if (sorted.empty()) return;
  *svg += "<polyline points=\"";
  const size_t points = std::min(kPointsMax, sorted.size());
  for (size_t point = 0; point < points; ++point) {
    const size_t index =
        points == 1 ? 0 : point * (sorted.size() - 1) / (points - 1);
    const double share =
        static_cast<double>(index + 1) / static_cast<double>(sorted.size());
    absl::StrAppend(svg, Number(left + sorted[index] * scale), ",",
                    Number(top + height - share * height), " ");
  }
  *svg += "\"/>\n";
}

std::vector<Panel> PanelsOf(const Report& report) {
  const std::string what = absl::StrCat(report.scenario, ", ", report.nodes,
                                        " nodes of ", report.ranks, " ranks");
  std::vector<Panel> panels = {
      {.title = what,
       .unit = "simulated ms until a rank is attached",
       .share = "of the ranks",
       .values = report.attach_ms},
      {.title = what,
       .unit = "log lines of a node",
       .share = "of the nodes",
       .values = {report.log_lines.begin(), report.log_lines.end()}}};
  if (report.attach_again_ms.empty()) return panels;
  panels.insert(panels.begin() + 1,
                Panel{.title = what,
                      .unit = "simulated ms until a rank is attached again",
                      .share = "of the ranks",
                      .values = report.attach_again_ms});
  return panels;
}

}  // namespace

std::string PlotOf(absl::Span<const Report> reports) {
  std::string body;
  double y = 0;
  double width = kPanelWidth;
  for (const Report& report : reports) {
    double x = 0;
    for (const Panel& panel : PanelsOf(report)) {
      AppendPanel(panel, x, y, &body);
      x += kPanelWidth;
    }
    width = std::max(width, x);
    y += kPanelHeight;
  }
  return absl::StrCat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", Number(width),
      "\" height=\"", Number(y), "\" viewBox=\"0 0 ", Number(width), " ",
      Number(y),
      "\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<style>line{stroke:#888}polyline{fill:none;stroke:#1f77b4;"
      "stroke-width:1.5}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      body, "</svg>\n");
}

}  // namespace optstate::simulation
