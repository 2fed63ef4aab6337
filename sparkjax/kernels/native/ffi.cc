// The XLA FFI targets. Shapes are checked here; the work is in the headers.

#include <cstdint>
#include <string>
#include <vector>

#include "linear.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "sparkjax native: " + what);
}

int64_t clamp(int64_t a, int64_t low, int64_t high) { return a < low ? low : a > high ? high : a; }

// x f32 [rows, K]; layer, live int32 []; weights [L, N, bytes of a row] or [L, N, K] -> f32
// [rows, N] each.
ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> live, ffi::RemainingArgs weights, ffi::RemainingRets results,
                  ffi::Span<const int64_t> kinds) {
  if (x.dimensions().size() != 2) return invalid("x is not a matrix");
  if (weights.size() != results.size() || weights.size() != kinds.size())
    return invalid("as many weights, results and kinds");
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  std::vector<Weight> list;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!w || !y) return invalid("an operand is no buffer");
    const auto shape = w->dimensions();
    const int64_t kind = kinds[i];
    if (shape.size() != 3 || kind < 0 || kind >= kKinds) return invalid("unknown weight");
    const int64_t stored = shape[2] * static_cast<int64_t>(ffi::ByteWidth(w->element_type()));
    if (stored != row_bytes(kind, k) || (kind >= kQ4_0 && k % kBlock))
      return invalid("the weight's rows do not have x's width");
    if ((*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != rows ||
        (*y)->dimensions()[1] != shape[1])
      return invalid("a result of another shape");
    const int64_t at = clamp(*layer.typed_data(), 0, shape[0] - 1);
    list.push_back({kind, static_cast<const uint8_t*>(w->untyped_data()) + at * shape[1] * stored,
                    shape[1], (*y)->typed_data()});
  }
  linear_group(pool, pool.num_threads(), x.typed_data(), rows, clamp(*live.typed_data(), 0, rows),
               k, list.data(), static_cast<int64_t>(list.size()));
  return ffi::Error::Success();
}

// ids int32 [T]; table [N, bytes of a row] or [N, K] -> f32 [T, K].
ffi::Error embed_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer table,
                      ffi::ResultBuffer<ffi::F32> out, int64_t kind) {
  const auto shape = table.dimensions();
  if (shape.size() != 2 || out->dimensions().size() != 2 || kind < 0 || kind >= kKinds)
    return invalid("unknown table");
  const int64_t k = out->dimensions()[1];
  if (shape[1] * static_cast<int64_t>(ffi::ByteWidth(table.element_type())) != row_bytes(kind, k) ||
      (kind >= kQ4_0 && k % kBlock) ||
      out->dimensions()[0] != static_cast<int64_t>(ids.element_count()))
    return invalid("a result of another shape");
  if (shape[0] == 0) return invalid("an empty table");
  embed(pool, pool.num_threads(), kind, static_cast<const uint8_t*>(table.untyped_data()), shape[0],
        k, ids.typed_data(), out->dimensions()[0], out->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparkjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_linear, sparkjax::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kinds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_embed, sparkjax::embed_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("kind"));
