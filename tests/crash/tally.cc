#include "tests/crash/tally.h"

namespace optstate::crash {

std::ostream& operator<<(std::ostream& out, const Tally& tally) {
  return out << "rounds               " << tally.rounds << "\n"
             << "steps                " << tally.steps << "\n"
             << "engine kills         " << tally.engine << "\n"
             << "  in a step          " << tally.engine_in_step << "\n"
             << "  again              " << tally.engine_again << "\n"
             << "  unsupervised       " << tally.engine_unsupervised << "\n"
             << "supervisor kills     " << tally.supervisor << "\n"
             << "  in a step          " << tally.supervisor_in_step << "\n"
             << "rank kills           " << tally.rank << "\n"
             << "  in push            " << tally.rank_in_push << "\n"
             << "  in commit          " << tally.rank_in_commit << "\n"
             << "  in fetch           " << tally.rank_in_fetch << "\n"
             << "  with the engine    " << tally.rank_with_engine << "\n"
             << "steps recovered      " << tally.steps_recovered << "\n"
             << "runs rolled back     " << tally.runs_rolled_back << "\n";
}

}  // namespace optstate::crash
