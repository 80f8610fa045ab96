// Calls a kernel with pointers out of an array and, last, the number of items: whatever its parameters' types are.
#pragma once
#include <cstddef>
#include <utility>

template <typename T>
struct Parameter {
    static T from(void* const* pointers, std::size_t index, int) { return static_cast<T>(pointers[index]); }
};
template <>
struct Parameter<int> {
    static int from(void* const*, std::size_t, int items) { return items; }
};

template <auto Kernel>
struct Entry;
template <typename... P, void (*Kernel)(P...)>
struct Entry<Kernel> {
    static void run(void* const* pointers, int items) { call(pointers, items, std::index_sequence_for<P...>{}); }

    template <std::size_t... I>
    static void call(void* const* pointers, int items, std::index_sequence<I...>) {
        Kernel(Parameter<P>::from(pointers, I, items)...);
    }
};
