#ifndef OPTSTATE_STORAGE_STATE_FOLDER_H_
#define OPTSTATE_STORAGE_STATE_FOLDER_H_

namespace optstate::storage {

// The state folder, below a job's directory.
inline constexpr char kStateFolder[] = "/state";
// The description file, in the state folder.
inline constexpr char kDescriptionFile[] = "job.binpb";
inline constexpr char kControlFileName[] = "control";

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_FOLDER_H_
