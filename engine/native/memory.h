// Aligned memory that grows but never shrinks; large blocks ask for huge pages (a step walks over all the weights).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace chorus {

template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(std::size_t count) { reserve(count); }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    /** Room for `count` elements; what was in there is lost when it grows. Throws std::bad_alloc. */
    void reserve(std::size_t count) {
        if (count <= size_) return;
        std::free(std::exchange(data_, nullptr));
        size_ = 0;
        const std::size_t alignment = count * sizeof(T) >= kHugePage ? kHugePage : 64;
        const std::size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
        data_ = static_cast<T*>(std::aligned_alloc(alignment, bytes));
        if (data_ == nullptr) throw std::bad_alloc();
        if (alignment == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
        size_ = count;
    }

    T* data() const { return data_; }
    std::size_t size() const { return size_; }
    T& operator[](std::size_t i) const { return data_[i]; }

private:
    static constexpr std::size_t kHugePage = std::size_t{2} << 20;
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace chorus
