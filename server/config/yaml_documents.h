#ifndef OPTSTATE_SERVER_CONFIG_YAML_DOCUMENTS_H_
#define OPTSTATE_SERVER_CONFIG_YAML_DOCUMENTS_H_

#include <yaml-cpp/yaml.h>

#include <string>
#include <vector>

namespace optstate::config {

// Returns the documents of the text that have content: templates leave a "---"
// at either end. Throws YAML::ParserException where the text is no YAML, which
// yaml-cpp reports in no other way.
std::vector<YAML::Node> LoadDocuments(const std::string& text);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_YAML_DOCUMENTS_H_
