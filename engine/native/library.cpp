// The C interface that binding.py loads. Errors come back as a status and a message, never as an exception.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>

#include "step.h"

namespace {

struct Engine {
    chorus::Weights weights;
    std::unique_ptr<chorus::Step> step;
};

enum Status { kOk = 0, kInvalid = 1, kNoMemory = 2, kFailed = 3 };

template <class Body>
int guarded(char* message, std::size_t size, Body&& body) {
    const auto fail = [&](const std::exception& error, int status) {
        std::snprintf(message, size, "%s", error.what());
        return status;
    };
    try {
        body();
        return kOk;
    } catch (const std::invalid_argument& error) {
        return fail(error, kInvalid);
    } catch (const std::bad_alloc& error) {
        return fail(error, kNoMemory);
    } catch (const std::exception& error) {
        return fail(error, kFailed);
    }
}

}  // namespace

#define CHORUS_API extern "C" __attribute__((visibility("default")))

CHORUS_API int chorus_create(const chorus::Shape* shape, int num_pages, int num_threads, void** engine, char* message,
                             std::size_t size) {
    return guarded(message, size, [&] {
        if (num_pages < 1 || num_threads < 1)
            throw std::invalid_argument("the KV pool needs a page and the team a thread");
        auto made = std::make_unique<Engine>(Engine{chorus::Weights(*shape), nullptr});
        made->step = std::make_unique<chorus::Step>(*shape, made->weights, num_pages, num_threads);
        *engine = made.release();
    });
}

CHORUS_API void chorus_destroy(void* engine) { delete static_cast<Engine*>(engine); }

CHORUS_API int chorus_load(void* engine, const char* name, int layer, const chorus::bf16* data, int rows, int columns,
                           char* message, std::size_t size) {
    return guarded(message, size,
                   [&] { static_cast<Engine*>(engine)->weights.load(name, layer, data, rows, columns); });
}

/** The same parameter once more, as blocks of a GGUF type. */
CHORUS_API int chorus_load_packed(void* engine, const char* name, int layer, const char* type,
                                  const std::uint8_t* blocks, int rows, int columns, char* message, std::size_t size) {
    return guarded(message, size, [&] {
        static_cast<Engine*>(engine)->weights.load_packed(name, layer, type, blocks, rows, columns);
    });
}

/** How many matrices are packed, once all that are not equal to their panels have been dropped. */
CHORUS_API int chorus_check_packed(void* engine) { return static_cast<Engine*>(engine)->weights.check_packed(); }

CHORUS_API int chorus_execute(void* engine, const chorus::Plan* plan, char* message, std::size_t size) {
    return guarded(message, size, [&] { static_cast<Engine*>(engine)->step->execute(*plan); });
}

/** The last step's logits, [logit rows][width]; columns beyond the vocabulary are -inf. */
CHORUS_API const float* chorus_logits(void* engine, int* width) {
    *width = static_cast<Engine*>(engine)->step->logits_width();
    return static_cast<Engine*>(engine)->step->logits();
}

/** The KV pool: [layer][page][kv head][keys, values], for tests that look at it or poison it. */
CHORUS_API chorus::bf16* chorus_pool(void* engine, std::size_t* elements) {
    *elements = static_cast<Engine*>(engine)->step->pool_size();
    return static_cast<Engine*>(engine)->step->pool();
}

/** Seconds that the last step spent in each phase, [Phases::kCount]. */
CHORUS_API const double* chorus_phases(void* engine) { return static_cast<Engine*>(engine)->step->phases().seconds(); }
