// Runs the checks on every path of this machine, or on those named, and prints one line for each:
//
//   best avx2
//   avx2 linear 5d3c6d0d3f2a9be1
//
// Ends with status 1 at the first difference, naming it.
#include <cinttypes>
#include <exception>

#include "checks.h"
#include "common/dispatch.h"

namespace {

struct Check {
  const char* name;
  void (*run)(driver::Digest&);
};

constexpr Check kChecks[] = {
    {"attention", driver::check_attention},
    {"embedding", driver::check_embedding},
    {"limits", driver::check_limits},
    {"linear", driver::check_linear},
    {"linear_int8", driver::check_linear_int8},
    {"norm", driver::check_norm},
    {"parallel", driver::check_parallel},
    {"pointwise", driver::check_pointwise},
    {"qlinear", driver::check_qlinear},
    {"rope", driver::check_rope},
    {"sampling", driver::check_sampling},
    {"softcap", driver::check_softcap},
    {"tape", driver::check_tape},
};

std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t end; (end = names.find(", ", start)) != std::string::npos; start = end + 2)
    parts.push_back(names.substr(start, end - start));
  parts.push_back(names.substr(start));
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> paths(argv + 1, argv + argc);
  if (paths.empty()) paths = split(pagemill::available_isas());
  std::printf("best %s\n", pagemill::isa_name(pagemill::best_isa()));
  try {
    for (const std::string& path : paths) {
      pagemill::force_isa(path);
      for (const Check& check : kChecks) {
        driver::Digest digest;
        check.run(digest);
        std::printf("%s %s %016" PRIx64 "\n", path.c_str(), check.name, digest.value());
        std::fflush(stdout);
      }
    }
  } catch (const std::exception& error) {
    driver::fail(error.what());
  }
  return 0;
}
