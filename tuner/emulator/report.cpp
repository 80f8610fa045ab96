// Reports: what went wrong, as "key value" lines in a file. The first report ends the process with exit code 3.
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "runtime.h"

namespace emulator {

static int file = -1;

void open_report(const char* path) {
    file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) std::perror("report"), std::exit(1);
}

void report(const char* kind, const void* pc, const Access* access, const char* text, const Fact* facts, int count) {
    char line[2048];
    int size = std::snprintf(line, sizeof line, "kind %s\ntext %s\n", kind, text);
    const auto number = [&](const char* key, long long value) {
        size += std::snprintf(line + size, sizeof line - std::size_t(size), "%s %lld\n", key, value);
    };
    if (here.kernel) {
        size += std::snprintf(line + size, sizeof line - std::size_t(size), "kernel %s\n", here.kernel->name);
        number("block", here.block);
    }
    if (here.thread >= 0) number("thread", here.thread);
    if (pc) number("pc", (long long)reinterpret_cast<std::uintptr_t>(pc));
    if (access) {
        size += std::snprintf(line + size, sizeof line - std::size_t(size), "verb %s\n", access->verb);
        number("region", access->region);
        number("byte", access->byte);
        number("bytes", access->bytes);
    }
    for (int i = 0; i < count; ++i) number(facts[i].key, facts[i].value);
    const bool written = write(file, line, std::size_t(size)) == size;
    _exit(written ? 3 : 1);
}

void report_total(const char* kernel, std::uintptr_t place, bool is_line, long long wavefronts, long long conflicts, long long splits) {
    dprintf(file, "%s %s %lld %lld %lld %lld\n", kernel, is_line ? "line" : "pc", (long long)place, wavefronts, conflicts, splits);
}

static void on_signal(int signal, siginfo_t* info, void* context) {
    const void* pc = nullptr;
#if defined(__x86_64__)
    pc = reinterpret_cast<const void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1);
#endif
    (void)context;
    if (signal == SIGALRM) report("timeout", pc, nullptr, "was still running when the time was over");
    if (signal == SIGFPE) report("crash", pc, nullptr, "divides an integer by zero");
    if (signal == SIGSEGV && in_guard(info->si_addr)) report("stack", pc, nullptr, "needs more local memory than the emulator has for a thread");
    report("crash", pc, nullptr, signal == SIGILL ? "executes an illegal instruction" : "touches memory that is not mapped");
}

void catch_signals(int seconds) {
    static char stack[64 * 1024];
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(signal, &action, nullptr);
    itimerval timer{};
    timer.it_value.tv_sec = seconds;
    setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace emulator
