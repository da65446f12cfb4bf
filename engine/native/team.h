// A persistent team of threads that runs one job at a time, all of its threads in the same function.
//
// Inside a job the threads meet at barriers and spin there for a while; between jobs the helpers sleep in the kernel.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace chorus {

/** How `for_each` deals out its items. Contiguous: a run per thread (it streams memory); then help the others.
    InOrder: one common queue, for items sorted from big to small. */
enum class Deal { Contiguous, InOrder };

class Team {
public:
    explicit Team(int num_threads)
        : size_(num_threads), next_(std::make_unique<Counter[]>(static_cast<std::size_t>(size_))) {
        for (int thread = 1; thread < size_; ++thread) helpers_.emplace_back([this, thread] { help(thread); });
    }

    ~Team() {
        job_ = nullptr;
        start();
        for (std::thread& helper : helpers_) helper.join();
    }

    int size() const { return size_; }

    /** Call job(thread) on every thread, the caller being thread 0; return when all have. A job must not throw. */
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        start();
        job(0);
        barrier();
    }

    /** Wait until every thread of the job is here. */
    void barrier() {
        const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            for (int i = 0; i < size_; ++i)
                next_[static_cast<std::size_t>(i)].value.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
            if (spins < kSpins) {
                _mm_pause();
            } else {
                sched_yield();  // somebody else needs this core, perhaps the thread that we wait for
            }
        }
    }

    /** body(item) once for every item of 0 .. count - 1, then a barrier. All threads call it with equal arguments. */
    template <class Body>
    void for_each(int thread, int count, Deal deal, Body&& body) {
        const int runs = deal == Deal::Contiguous ? size_ : 1;
        for (int i = 0; i < runs; ++i) {
            const int run = (thread + i) % runs;
            const int begin = bound(count, run, runs), end = bound(count, run + 1, runs);
            std::atomic<int>& next = next_[static_cast<std::size_t>(run)].value;
            for (int item; (item = begin + next.fetch_add(1, std::memory_order_relaxed)) < end;) body(item);
        }
        barrier();
    }

private:
    static constexpr int kSpins = 2000;

    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    static int bound(int count, int run, int runs) { return static_cast<int>(std::int64_t{count} * run / runs); }

    void start() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void help(int thread) {
        for (std::uint32_t seen = 0;; ++seen) {
            jobs_.wait(seen, std::memory_order_acquire);
            if (job_ == nullptr) return;
            (*job_)(thread);
            barrier();
        }
    }

    const int size_;
    std::unique_ptr<Counter[]> next_;  // items taken from each run; the last to arrive at a barrier starts them afresh
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::uint32_t> phase_{0};
    alignas(64) std::atomic<std::uint32_t> jobs_{0};
    const std::function<void(int)>* job_ = nullptr;
    std::vector<std::thread> helpers_;
};

}  // namespace chorus
