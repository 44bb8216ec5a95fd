// Process-wide thread pool. Its threads outlive calls, and `share` distributes jobs among them with an atomic counter.
//
// A caller waits only for jobs that a thread has taken, not for threads to wake up. So a descheduled thread delays the caller
// only if it was stopped inside a job. Therefore jobs are short, and waiting threads spin for microseconds only. Threads are
// started on first use, and again after a fork. Any number of callers may use them concurrently. The caller also runs jobs
// itself, and runs all of them if no thread is free.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace team {

constexpr int64_t MOST = 1024;          // maximum number of threads
constexpr int64_t PLACES = 8;           // maximum number of concurrent callers with helpers; further callers run their jobs alone
constexpr int64_t SPIN_NS = 50'000;     // time that a thread spins before it yields the core
constexpr int64_t NAP_NS = 200'000;     // one sleep of a waiting caller; the scheduler may then move a thread to its idle core
constexpr int64_t IDLE_NS = 2'000'000;  // time without a job after which a thread sleeps

inline int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Lets one thread sleep until another thread wakes it. `wake` costs one load if the thread is awake.
class Bed {
  public:
    // Sleeps until woken, or for at most `limit` nanoseconds (0: no limit). Returns immediately if `ready()` is true.
    template <typename Ready>
    void sleep(int64_t limit, Ready&& ready) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.store(true);
        if (!ready()) {
            const auto up = [&] { return !asleep.load(); };
            if (limit) signal.wait_for(lock, std::chrono::nanoseconds(limit), up);
            else signal.wait(lock, up);
        }
        asleep.store(false);
    }

    void wake() {
        if (!asleep.load()) return;
        std::lock_guard<std::mutex> lock(mutex);
        asleep.store(false);
        signal.notify_one();
    }

  private:
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable signal;
};

// The jobs of one caller. The upper half of `tickets` counts calls of `share`; the lower half counts the jobs not yet taken. A
// compare-and-swap of the whole word takes a job, so a ticket of an earlier call is never mistaken for a current one.
class alignas(64) Place {
  public:
    std::atomic<bool> taken{false};
    std::atomic<int64_t> helpers{0};  // the first `helpers` threads of the team may take jobs here

    // Offers jobs 0 to count - 1.
    void open(void (*job)(const void*, int64_t), const void* context, int64_t count) {
        run = job;
        argument = context;
        total = count;
        done.store(0);
        tickets.store(((tickets.load() >> 32) + 1) << 32 | static_cast<uint64_t>(count));
    }

    // Takes a job and runs it; returns false if no job is left.
    bool work() {
        uint64_t ticket = tickets.load();
        do {
            if (!static_cast<uint32_t>(ticket)) return false;
        } while (!tickets.compare_exchange_weak(ticket, ticket - 1));
        // The caller waits until this job is counted in `done` below, so the values written by `open` stay valid.
        const int64_t count = total;
        run(argument, count - static_cast<int64_t>(static_cast<uint32_t>(ticket)));
        if (done.fetch_add(1) + 1 == count) caller.wake();
        return true;
    }

    // Whether a job is left and thread `index` may take it.
    bool invites(int64_t index) const { return static_cast<uint32_t>(tickets.load()) && index < helpers.load(); }

    // Waits until the jobs taken by other threads are done. The caller has found no further job to take.
    void wait() {
        const auto finished = [&] { return done.load() == total; };
        for (int64_t round = 0, start = 0; !finished(); round++) {
            relax();
            if (round % 32 != 31) continue;
            if (!start) start = now();
            else if (now() - start > SPIN_NS) caller.sleep(NAP_NS, finished);
        }
    }

  private:
    void (*run)(const void*, int64_t) = nullptr;
    const void* argument = nullptr;
    int64_t total = 0;
    alignas(64) std::atomic<uint64_t> tickets{0};
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) Bed caller;
};

class Team {
  public:
    // Returns the team of the process. It is never destroyed, because its threads run until the process exits.
    static Team& mine() {
        static std::once_flag once;
        std::call_once(once, [] {
            current().store(new Team);
            // A forked child has none of the threads and needs a new team.
            pthread_atfork(nullptr, nullptr, [] { current().store(new Team); });
        });
        return *current().load();
    }

    // Claims a place with this many helpers; returns null if all places are taken.
    Place* enter(int64_t helpers) {
        grow(helpers);
        for (Place& place : places)
            if (bool free = false; place.taken.compare_exchange_strong(free, true)) {
                place.helpers.store(helpers);
                return &place;
            }
        return nullptr;
    }

    // Wakes every sleeping thread among the first `helpers` threads.
    void call(int64_t helpers) {
        helpers = std::min(helpers, size.load());
        for (int64_t i = 0; i < helpers; i++) beds[i].wake();
    }

  private:
    struct Start {
        Team* team;
        int64_t index;
    };

    Place places[PLACES];
    Bed beds[MOST];
    std::atomic<int64_t> size{0};
    std::mutex mutex;

    static std::atomic<Team*>& current() {
        static std::atomic<Team*> team{nullptr};
        return team;
    }

    // Starts threads until there are `helpers` of them, or until the system refuses one.
    void grow(int64_t helpers) {
        if (size.load() >= helpers) return;
        std::lock_guard<std::mutex> lock(mutex);
        for (int64_t i = size.load(); i < helpers; i++) {
            if (!start(i)) return;
            size.store(i + 1);
        }
    }

    bool start(int64_t index) {
        if (index >= MOST) return false;
        auto* given = new Start{this, index};
        // The new thread blocks all signals, because they must be delivered to the interpreter's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        const int failed = pthread_create(&thread, nullptr, [](void* argument) -> void* {
            const Start start = *static_cast<Start*>(argument);
            delete static_cast<Start*>(argument);
            start.team->serve(start.index);
            return nullptr;
        }, given);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (failed) {
            delete given;
            return false;
        }
#if defined(__linux__)
        pthread_setname_np(thread, "rollout-kernels");
#endif
        pthread_detach(thread);
        return true;
    }

    [[noreturn]] void serve(int64_t index) {
        const auto invited = [&] {
            return std::any_of(places, places + PLACES, [&](const Place& place) { return place.invites(index); });
        };
        for (int64_t start = 0, round = 0;; round++) {
            for (Place& place : places)
                while (place.invites(index) && place.work()) round = start = 0;
            relax();
            if (round % 32 != 31) continue;
            if (!start) start = now();
            const int64_t idle = now() - start;
            if (idle > SPIN_NS) sched_yield();
            if (idle > IDLE_NS) {
                beds[index].sleep(0, invited);
                round = start = 0;
            }
        }
    }
};

// A caller's claim on the team, for the duration of one call.
class Crew {
  public:
    explicit Crew(int64_t threads) : threads(std::min(threads, MOST)) {
        if (threads < 2) return;
        team = &Team::mine();
        place = team->enter(this->threads - 1);
    }
    ~Crew() {
        if (place) place->taken.store(false);
    }
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    const int64_t threads;

    // Runs job(0) to job(count - 1), in any order and on any thread. On return all jobs are done and their writes are visible.
    template <typename Job>
    void share(int64_t count, Job&& job) const {
        if (!place || count < 2) {
            for (int64_t i = 0; i < count; i++) job(i);
            return;
        }
        place->open([](const void* context, int64_t i) { (*static_cast<const Job*>(context))(i); }, &job, count);
        team->call(std::min(count, threads) - 1);
        while (place->work());
        place->wait();
    }

  private:
    Team* team = nullptr;
    Place* place = nullptr;
};

// Returns scratch memory of the calling thread, valid until its next call for the same T and aligned to cache lines.
template <typename T>
inline T* scratch(int64_t count) {
    constexpr int64_t LINE = 64;
    static thread_local std::vector<T> memory;
    count += LINE / static_cast<int64_t>(sizeof(T));
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + LINE - 1) / LINE * LINE);
}

}  // namespace team
