// The cells of LSTM and GRU, and their gradients.
//
// torch sends a PrivateUse1 device to the fused cells, which have no CPU kernel, so every vendor
// must bring them. Here they are composed of the device's own operators.
//
// The shapes: gates (batch, 4 or 3 hidden), states (batch, hidden), biases (4 or 3 hidden).
#pragma once

#include "runtime.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

namespace fake {

using MaybeTensor = std::optional<at::Tensor>;

inline bool given(const MaybeTensor& tensor) {
  return tensor && tensor->defined();
}

inline at::Tensor plus_bias(const at::Tensor& gates, const MaybeTensor& bias) {
  return given(bias) ? gates + *bias : gates;
}

inline at::Tensor sigmoid_slope(const at::Tensor& value) {
  return value * (1 - value);
}

inline at::Tensor tanh_slope(const at::Tensor& value) {
  return 1 - value * value;
}

// -> hidden state, cell state, and the activated gates, which backward needs.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  require(kRecurrentLayers);
  const auto gates = plus_bias(input_gates, input_bias) + plus_bias(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid();
  const auto cell = parts[2].tanh(), out = parts[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

// -> gradients of the gates, of the old cell state, and of each bias.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const MaybeTensor& grad_hy, const MaybeTensor& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& activated, bool has_bias) {
  require(kRecurrentLayers);
  if (!given(grad_hy) && !given(grad_cy)) {
    return {};
  }
  const auto parts = activated.chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const auto squashed = cy.tanh();
  const auto from_hidden = given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto from_cell = from_hidden * out * tanh_slope(squashed);
  if (given(grad_cy)) {
    from_cell = from_cell + *grad_cy;
  }
  const auto grad_gates = at::cat(
      {from_cell * cell * sigmoid_slope(in), from_cell * cx * sigmoid_slope(forget),
       from_cell * in * tanh_slope(cell), from_hidden * squashed * sigmoid_slope(out)},
      1);
  const auto grad_bias = has_bias ? grad_gates.sum(0) : at::Tensor();
  return {grad_gates, from_cell * forget, grad_bias};
}

// -> hidden state, and what backward needs.
inline std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  require(kRecurrentLayers);
  const auto from_input = plus_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = plus_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  const auto workspace = at::cat({reset, update, fresh, hx, from_hidden[2]}, 1);
  return {fresh + update * (hx - fresh), workspace};
}

// -> gradients of the input gates, the hidden gates, the old state, and the two biases.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  require(kRecurrentLayers);
  const auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3];
  const auto& hidden = parts[4];
  const auto grad_update = grad_hy * (hx - fresh) * sigmoid_slope(update);
  const auto grad_fresh = grad_hy * (1 - update) * tanh_slope(fresh);
  const auto grad_reset = grad_fresh * hidden * sigmoid_slope(reset);
  const auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  if (!has_bias) {
    return {grad_input, grad_hidden, grad_hy * update, at::Tensor(), at::Tensor()};
  }
  return {grad_input, grad_hidden, grad_hy * update, grad_input.sum(0), grad_hidden.sum(0)};
}

} // namespace fake
