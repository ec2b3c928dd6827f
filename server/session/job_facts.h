#ifndef OPTSTATE_SERVER_SESSION_JOB_FACTS_H_
#define OPTSTATE_SERVER_SESSION_JOB_FACTS_H_

#include <cstdint>
#include <string>

#include "google/protobuf/timestamp.pb.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job.h"
#include "server/session/job_description.h"
#include "storage/format/control_file.h"

namespace optstate::session {

void SetTimestamp(int64_t unix_ns, google::protobuf::Timestamp* timestamp);

StepOutcome OutcomeOf(const storage::StepRecord& record);

// These fill the operators' view of a job from its description and its last
// step.
void AddDescription(const JobDescription& description, v1::Job* job);
void AddRecord(const storage::StepRecord& record, v1::Job* job);

// Fills in both, and the bytes, from the files of a job that no engine
// describes, even while a process writes them. Sets state_unknown where they
// cannot be read.
void AddFromFiles(const std::string& job_dir, v1::Job* job);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_FACTS_H_
