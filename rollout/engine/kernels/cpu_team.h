// Process-wide thread pool: threads that outlive calls, and `share`, which distributes jobs by an atomic counter.
//
// A caller waits only for jobs that a thread has taken, not for threads to arrive: a descheduled thread delays the caller only
// if it was stopped inside a job. So jobs are short, and waiting spins for microseconds only. Threads are started on first
// use, and again after a fork; any number of callers may use them concurrently. The caller runs jobs too, and all of them if
// no thread is free.

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

constexpr int64_t MOST = 1024;          // threads
constexpr int64_t PLACES = 8;           // callers with helpers at the same time; further ones run their jobs alone
constexpr int64_t SPIN_NS = 50'000;     // of spinning before the core is yielded
constexpr int64_t NAP_NS = 200'000;     // of a waiting caller at a time: an idle core makes the scheduler move a thread to it
constexpr int64_t IDLE_NS = 2'000'000;  // without a job before a thread sleeps

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

// Sleep and wake-up of one thread. `wake` costs one load if the thread is awake.
class Bed {
  public:
    // Returns when woken, immediately if `ready()` holds, or after `limit` nanoseconds (0: no limit).
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

// Jobs of one caller. The upper half of `tickets` counts calls of `share`, the lower half the jobs not yet taken. Taking a
// job is a compare-and-swap of the whole word, so a ticket of an earlier call is never mistaken for a current one.
class alignas(64) Place {
  public:
    std::atomic<bool> taken{false};
    std::atomic<int64_t> helpers{0};  // number of threads of the team that may take jobs here, from the first one on

    // Open `count` jobs.
    void open(void (*job)(const void*, int64_t), const void* context, int64_t count) {
        run = job;
        argument = context;
        total = count;
        done.store(0);
        tickets.store(((tickets.load() >> 32) + 1) << 32 | static_cast<uint64_t>(count));
    }

    // Take a job and run it; false if there is none.
    bool work() {
        uint64_t ticket = tickets.load();
        do {
            if (!static_cast<uint32_t>(ticket)) return false;
        } while (!tickets.compare_exchange_weak(ticket, ticket - 1));
        // From here to the count below the caller waits, so the values written by `open` stay valid.
        const int64_t count = total;
        run(argument, count - static_cast<int64_t>(static_cast<uint32_t>(ticket)));
        if (done.fetch_add(1) + 1 == count) caller.wake();
        return true;
    }

    // Whether thread `index` may take a job here and one is left.
    bool invites(int64_t index) const { return static_cast<uint32_t>(tickets.load()) && index < helpers.load(); }

    // Wait until the jobs taken by other threads are done; none is left to take.
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
    // The team of the process; never destroyed, since its threads run until the process exits.
    static Team& mine() {
        static std::once_flag once;
        std::call_once(once, [] {
            current().store(new Team);
            // A forked child has none of the threads and needs a new team.
            pthread_atfork(nullptr, nullptr, [] { current().store(new Team); });
        });
        return *current().load();
    }

    // Claim a place with this many helpers; null if all places are taken.
    Place* enter(int64_t helpers) {
        grow(helpers);
        for (Place& place : places)
            if (bool free = false; place.taken.compare_exchange_strong(free, true)) {
                place.helpers.store(helpers);
                return &place;
            }
        return nullptr;
    }

    // Wake the sleeping ones of the first `helpers` threads.
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

    // Start threads until there are `helpers`, as far as the system allows.
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
        // Signals must be delivered to the interpreter's threads.
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

    // Run job(0) to job(count - 1), in any order, on any thread; on return all are done and their writes visible.
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

// Scratch memory of the calling thread, valid until its next call; begins with a cache line, which no vector then crosses.
template <typename T>
inline T* scratch(int64_t count) {
    constexpr int64_t LINE = 64;
    static thread_local std::vector<T> memory;
    count += LINE / static_cast<int64_t>(sizeof(T));
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + LINE - 1) / LINE * LINE);
}

}  // namespace team
