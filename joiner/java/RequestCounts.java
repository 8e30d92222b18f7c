package roostream;

import java.util.concurrent.atomic.AtomicLongArray;

/**
 * How many requests a subtask of the join holds, by phase. The join counts in Python, in the thread of its task; WatermarkKeeper, in
 * the same chain and so in the same thread, stores the counts and reports them as metrics.
 */
public final class RequestCounts {
    /** In the order of the phases in joiner/state.py. */
    static final String[] PHASES = {"waiting", "open", "closed", "expired"};

    private static final ThreadLocal<RequestCounts> OF_TASK = ThreadLocal.withInitial(RequestCounts::new);
    private final AtomicLongArray counts = new AtomicLongArray(PHASES.length); // metrics are read by another thread

    static RequestCounts ofTask() {
        return OF_TASK.get();
    }

    /** Called from Python. */
    public static void add(int phase, int change) {
        OF_TASK.get().counts.addAndGet(phase, change);
    }

    void addAll(long[] part) {
        for (int phase = 0; phase < PHASES.length; phase++) {
            counts.addAndGet(phase, part[phase]);
        }
    }

    long get(int phase) {
        return counts.get(phase);
    }

    long[] toArray() {
        long[] out = new long[PHASES.length];
        for (int phase = 0; phase < PHASES.length; phase++) {
            out[phase] = counts.get(phase);
        }
        return out;
    }
}
