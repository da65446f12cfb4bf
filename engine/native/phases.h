// Where a step's time goes, for benchmarks and for people: seconds per kind of work, added up over the layers.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace chorus {

/** In the order of binding.py's PHASES. Each includes the waiting for its slowest thread. */
enum class Phase { Prepare, Queries, Attention, Output, Mlp, Logits, Sampling };

class Phases {
public:
    static constexpr std::size_t kCount = 7;

    void start() {
        seconds_.fill(0.0);
        last_ = Clock::now();
    }

    /** What has passed since the last call was `phase`. One thread only. */
    void end(Phase phase) {
        const Clock::time_point now = Clock::now();
        seconds_[static_cast<std::size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

    const double* seconds() const { return seconds_.data(); }

private:
    using Clock = std::chrono::steady_clock;

    std::array<double, kCount> seconds_{};
    Clock::time_point last_;
};

}  // namespace chorus
