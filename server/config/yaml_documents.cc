#include "server/config/yaml_documents.h"

#include <yaml-cpp/eventhandler.h>

#include <sstream>

namespace optstate::config {
namespace {

// Ends a parse that makes no progress. yaml-cpp does not consume a comma with
// which a document begins: it reports one empty document after the other, and
// YAML::LoadAll() collects them until memory is used up.
class ProgressCheck : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override {
    if (mark.pos == last_begin_) {
      throw YAML::ParserException(mark, "a key or a value is expected here");
    }
    last_begin_ = mark.pos;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnAlias(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {
  }
  void OnScalar(const YAML::Mark& /*mark*/, const std::string& /*tag*/,
                YAML::anchor_t /*anchor*/,
                const std::string& /*value*/) override {}
  void OnSequenceStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/,
                       YAML::anchor_t /*anchor*/,
                       YAML::EmitterStyle::value /*style*/) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/,
                  YAML::anchor_t /*anchor*/,
                  YAML::EmitterStyle::value /*style*/) override {}
  void OnMapEnd() override {}

 private:
  int last_begin_ = -1;  // of a document, in the text
};

}  // namespace

std::vector<YAML::Node> LoadDocuments(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  ProgressCheck check;
  while (parser.HandleNextDocument(check)) {
  }
  std::vector<YAML::Node> documents = YAML::LoadAll(text);
  std::erase_if(documents, [](const YAML::Node& each) {
    return each.IsNull() || !each.IsDefined();
  });
  return documents;
}

}  // namespace optstate::config
