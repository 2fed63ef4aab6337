// Collectives over a network, as XLA FFI calls on a CPU: the calling thread does all the work.

#include "world.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error collective(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t id, int64_t kind,
                      int64_t root) {
  World* w = world_of(id);
  if (!w || !w->network)
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "fabric: no such world");
  const bool half = x.element_type() == ffi::DataType::BF16;
  if (kind == kAllReduce && !half && x.element_type() != ffi::DataType::F32)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "fabric: all_reduce takes float32 or bfloat16");
  const std::string error =
      on_host(*w, kind, static_cast<const char*>(x.untyped_data()),
              static_cast<char*>(y->untyped_data()), static_cast<int64_t>(x.size_bytes()),
              static_cast<int>(root), half);
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "fabric: " + error);
}

}  // namespace

std::string attach(World&, int) { return ""; }
void detach(World&) {}

}  // namespace sparkjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_fabric, sparkjax::collective,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("world")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("root"));
