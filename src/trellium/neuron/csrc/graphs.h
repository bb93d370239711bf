// Compiled graphs: their arguments into the host's view, their results back.
#pragma once

#include <pybind11/pybind11.h>

namespace trellium::graphs {

void bind(pybind11::module_& m);

}  // namespace trellium::graphs
