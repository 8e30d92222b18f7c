package roostream;

/**
 * Divides a large step of the watermark, such as the first one after an outage, into slices. All timers of one watermark fire in
 * one call, and no checkpoint barrier passes during a call.
 *
 * <p>Call advance for each watermark that arrives, then emit next while hasNext, with other work in between.
 */
final class WatermarkSlices {
    static final long START = Long.MIN_VALUE;
    static final long END = Long.MAX_VALUE;
    private static final long MIN_SLICE_MS = 1_000;
    private static final long MAX_SLICES = 64;
    private long emittedMs = START;
    private long targetMs = START;
    private long sliceMs;

    /** Continues after `ms`, the newest watermark of a checkpoint. END is no time: a job that is restored has more input. */
    void restore(long ms) {
        if (ms != END && ms > emittedMs) {
            emittedMs = ms;
            targetMs = ms;
        }
    }

    /** A watermark has arrived. After END, the end of input, nothing is left to emit here. */
    void advance(long ms) {
        if (ms == END) {
            emittedMs = targetMs;
            return;
        }
        if (ms <= targetMs) {
            return;
        }
        if (targetMs == START) {
            emittedMs = ms - 1; // nothing is due before the first watermark
        }
        targetMs = ms;
        sliceMs = Math.max(MIN_SLICE_MS, (targetMs - emittedMs) / MAX_SLICES);
    }

    boolean hasNext() {
        return emittedMs < targetMs;
    }

    long next() {
        emittedMs = Math.min(emittedMs + sliceMs, targetMs);
        return emittedMs;
    }

    /** The newest watermark that was emitted or restored; START before the first. */
    long emittedMs() {
        return emittedMs;
    }

    /** How much event time has arrived but is not emitted yet. */
    long pendingMs() {
        return targetMs - emittedMs;
    }
}
