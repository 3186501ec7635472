// pagemill/_C: the list of operations, one line each. Python passes addresses and sizes; the wrappers
// in pagemill/ops/cpu.py check tensors and allocate outputs, the operations check numbers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "embedding/embedding.h"
#include "limits/limits.h"
#include "linear/linear.h"
#include "linear_int8/linear_int8.h"
#include "norm/norm.h"
#include "pointwise/pointwise.h"
#include "qlinear/qlinear.h"
#include "rope/rope.h"
#include "sampling/sampling.h"
#include "softcap/softcap.h"
#include "tape/tape.h"

namespace nb = nanobind;

NB_MODULE(_C, m) {
  using namespace pagemill;
  m.def("active_isa", [] { return std::string(isa_name(active_isa())); });
  m.def("available_isas", &available_isas);
  m.def("force_isa", &force_isa);
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
  m.def("pin_threads", &pin_threads);
  // Operations that a model's forward pass calls are `recorded`. The interpreter runs other threads
  // meanwhile.
  using Free = nb::call_guard<nb::gil_scoped_release>;
  m.def("touch_tiles", &touch_tiles, Free());
  m.def("pack_linear", &pack_linear, Free());
  m.def("linear_rows", recorded(&linear_rows), Free());
  m.def("linear", recorded(&linear), Free());
  m.def("pack_int8", &pack_int8, Free());
  m.def("quantize_int8", &quantize_int8, Free());
  m.def("linear_int8_rows", recorded(&linear_int8_rows), Free());
  m.def("linear_int8", recorded(&linear_int8), Free());
  m.def("linear_int8_scratch_bytes", &linear_int8_scratch_bytes);
  m.def("peak_int8_ops", &peak_int8_ops, Free());
  m.def("embedding", recorded(&embedding), Free());
  m.def("rms_norm", recorded(&rms_norm), Free());
  m.def("layer_norm", recorded(&layer_norm), Free());
  m.def("rotate_heads", recorded(&rotate_heads), Free());
  m.def("rope_angles", recorded(&rope_angles), Free());
  m.def("scale", recorded(&scale), Free());
  m.def("soft_cap", recorded(&soft_cap), Free());
  m.def("activate", recorded(&activate), Free());
  m.def("add", recorded(&add), Free());
  m.def("add_rows", recorded(&add_rows), Free());
  m.def("gather_columns", recorded(&gather_columns), Free());
  m.def("best_rows", recorded(&best_rows), Free());
  m.def("draw_rows", recorded(&draw_rows), Free());
  m.def("score_rows", recorded(&score_rows), Free());
  m.def("penalize_row", &penalize_row, Free());
  m.def("peak_flops", &peak_flops, Free());
  m.def("read_memory", &read_memory, Free());
  m.def("read_pieces", &read_pieces, Free());
  m.def("linear_scratch_bytes", &linear_scratch_bytes);
  nb::class_<QMatrix>(m, "QMatrix")
      .def(nb::init<int, int64_t, int64_t, int64_t, int, uintptr_t, uintptr_t, uintptr_t, int,
                    uintptr_t, const std::vector<int>&>());
  m.def("qlinear", recorded(&qlinear), Free());
  m.def("qlinear_rows", recorded(&qlinear_rows), Free());
  m.def("qlinear_pack", &qlinear_pack, Free());
  m.def("qlinear_quantize", &qlinear_quantize, Free());
  m.def("qlinear_scratch_bytes", &qlinear_scratch_bytes);
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<std::vector<int64_t>, std::vector<int64_t>, uintptr_t, int64_t, uintptr_t,
                    int64_t, int64_t>());
  m.def("attention", recorded_attention(&attention), Free());
  m.def("attention_scratch_bytes", &attention_scratch_bytes);
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<uintptr_t, uintptr_t, int64_t>())
      .def("start", &Tape::start)
      .def("stop", &Tape::stop)
      .def("__len__", &Tape::size)
      .def("replay", &Tape::replay, Free());
  m.def("kernel_seconds", &kernel_seconds);
}
