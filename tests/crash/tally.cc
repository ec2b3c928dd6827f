#include "tests/crash/tally.h"

#include <iomanip>

namespace optstate::crash {

void Tally::NoteRound(Wire wire, const Scenario& scenario) {
  ++rounds;
  steps += scenario.steps;
  ++rounds_with["wire"][std::string(Name(wire))];
  for (const auto& [kind, choice] : scenario.Choices()) {
    ++rounds_with[kind][choice];
  }
}

std::ostream& operator<<(std::ostream& out, const Tally& tally) {
  out << "rounds               " << tally.rounds << "\n"
      << "steps                " << tally.steps << "\n"
      << "engine kills         " << tally.engine << "\n"
      << "  in a step          " << tally.engine_in_step << "\n"
      << "  in a load          " << tally.engine_in_load << "\n"
      << "  in a sealed load   " << tally.engine_in_sealed_load << "\n"
      << "  again              " << tally.engine_again << "\n"
      << "  unsupervised       " << tally.engine_unsupervised << "\n"
      << "  in an upgrade      " << tally.engine_in_upgrade << "\n"
      << "supervisor kills     " << tally.supervisor << "\n"
      << "  in a step          " << tally.supervisor_in_step << "\n"
      << "  in an upgrade      " << tally.supervisor_in_upgrade << "\n"
      << "daemon told to end   " << tally.terminations << "\n"
      << "  in a step          " << tally.terminations_in_step << "\n"
      << "rank kills           " << tally.rank << "\n"
      << "  in push            " << tally.rank_in_push << "\n"
      << "  in commit          " << tally.rank_in_commit << "\n"
      << "  in fetch           " << tally.rank_in_fetch << "\n"
      << "  in load            " << tally.rank_in_load << "\n"
      << "  with the engine    " << tally.rank_with_engine << "\n"
      << "  in an upgrade      " << tally.rank_in_upgrade << "\n"
      << "upgrades             " << tally.upgrades << "\n"
      << "  by SIGHUP          " << tally.upgrades_by_signal << "\n"
      << "  in a step          " << tally.upgrades_in_step << "\n"
      << "  done               " << tally.upgrades_done << "\n"
      << "  engine kept        " << tally.upgrades_keep_engine << "\n"
      << "losses of power      " << tally.power << "\n"
      << "  in a step          " << tally.power_in_step << "\n"
      << "  with a step less   " << tally.power_lost_steps << "\n"
      << "steps recovered      " << tally.steps_recovered << "\n"
      << "runs rolled back     " << tally.runs_rolled_back << "\n"
      << "steps run again      " << tally.steps_again << "\n"
      << "rounds by\n";
  for (const auto& [kind, choices] : tally.rounds_with) {
    out << "  " << std::left << std::setw(17) << kind;
    for (const auto& [choice, rounds] : choices) {
      out << "  " << choice << " " << rounds;
    }
    out << "\n";
  }
  return out;
}

}  // namespace optstate::crash
