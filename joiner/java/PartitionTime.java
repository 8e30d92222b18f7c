package roostream;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.util.HashMap;
import java.util.Map;

/**
 * Event time of one partition, by the rules of PartitionTime in joiner/local_engine.py.
 *
 * <p>A source's watermark generators and the EventTimeKeeper in its chain run in the thread of one task. They share that task's
 * partitions through a thread-local map, because Flink gives a generator no state.
 */
final class PartitionTime {
    static final long START = Long.MIN_VALUE;
    private static final long NEVER = Long.MAX_VALUE;
    private static final ThreadLocal<Map<Long, PartitionTime>> OF_TASK = ThreadLocal.withInitial(HashMap::new);
    private static final ThreadLocal<Boolean> IS_RESTORED = ThreadLocal.withInitial(() -> false);

    /** Of the newest record. */
    long offset = -1;
    private final boolean isFirstConfirmed;
    private long newestMs = START;
    private long unconfirmedMs = NEVER;
    private final Map<String, Long> heartbeats = new HashMap<>();

    /** By Envelope.partitionOf. */
    static Map<Long, PartitionTime> ofTask() {
        return OF_TASK.get();
    }

    static PartitionTime ofTask(long partition) {
        return OF_TASK.get().computeIfAbsent(partition, unknown -> new PartitionTime(!IS_RESTORED.get()));
    }

    /** The task continues the state of another one. A partition without a stored time may have had records before. */
    static void continueTask() {
        IS_RESTORED.set(true);
    }

    /** @param isFirstConfirmed whether the first event needs no second one to confirm it */
    private PartitionTime(boolean isFirstConfirmed) {
        this.isFirstConfirmed = isFirstConfirmed;
    }

    void event(long timeMs, long maxStepMs) {
        boolean isFirst = newestMs == START && isFirstConfirmed;
        boolean isJump = !isFirst && timeMs > newestMs + maxStepMs;
        if (isJump && unconfirmedMs == NEVER) {
            unconfirmedMs = timeMs;
            return;
        }
        newestMs = Math.max(newestMs, isJump ? Math.min(timeMs, unconfirmedMs) : timeMs);
        unconfirmedMs = timeMs > newestMs + maxStepMs ? timeMs : NEVER;
    }

    void heartbeat(long timeMs, String producer, long timeoutMs) {
        newestMs = Math.max(newestMs, timeMs);
        if (!producer.isEmpty()) {
            heartbeats.merge(producer, timeMs, Math::max);
        }
        heartbeats.values().removeIf(ms -> ms < newestMs - timeoutMs);
    }

    void endMarker(long timeMs) {
        newestMs = Math.max(newestMs, timeMs);
        heartbeats.clear();
    }

    long reachedMs(long timeoutMs) {
        long slowest = NEVER;
        int live = 0;
        for (long ms : heartbeats.values()) {
            if (ms >= newestMs - timeoutMs) {
                slowest = Math.min(slowest, ms);
                live++;
            }
        }
        return live > 1 ? slowest : newestMs;
    }

    /** For operator state: partition, offset, newest time, unconfirmed time, and each producer with its heartbeat. */
    byte[] encode(long partition) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        try (DataOutputStream out = new DataOutputStream(bytes)) {
            out.writeLong(partition);
            out.writeLong(offset);
            out.writeLong(newestMs);
            out.writeLong(unconfirmedMs);
            out.writeInt(heartbeats.size());
            for (Map.Entry<String, Long> heartbeat : heartbeats.entrySet()) {
                out.writeUTF(heartbeat.getKey());
                out.writeLong(heartbeat.getValue());
            }
        }
        return bytes.toByteArray();
    }

    /** Adds a stored partition to those of the task, unless a newer state of it is there already. */
    static void restore(byte[] data) throws IOException {
        try (DataInputStream in = new DataInputStream(new ByteArrayInputStream(data))) {
            long partition = in.readLong();
            PartitionTime time = new PartitionTime(false);
            time.offset = in.readLong();
            time.newestMs = in.readLong();
            time.unconfirmedMs = in.readLong();
            for (int left = in.readInt(); left > 0; left--) {
                String producer = in.readUTF();
                time.heartbeats.put(producer, in.readLong());
            }
            OF_TASK.get().merge(partition, time, (a, b) -> a.offset >= b.offset ? a : b);
        }
    }
}
