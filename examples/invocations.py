"""Functions in the workspace, called by name. An id of one's own makes a call repeatable."""

from atoll import Atoll

MODULE = """
import os

def total(order):
    return sum(item["price"] for item in order["items"])

def ship(order):
    if not os.path.exists("stock"):
        raise RuntimeError("out of stock")
    return f"order {order['id']} is on its way"
"""
ORDER = {"id": 17, "items": [{"price": 3}, {"price": 4}]}

with Atoll() as atoll, atoll.session() as session:
    session.files.write("shop.py", MODULE)

    invocation = session.invoke("shop:total", input=ORDER, metadata={"order": "17"})
    print(invocation.status, invocation.result().return_value)

    # Asked for twice, run once.
    for _ in range(2):
        shipping = session.invoke("shop:ship", input=ORDER, invocation_id="ship-17")
    error = shipping.result().error
    assert error is not None
    print(shipping.status, error.message, len(list(shipping.executions())))

    # What has failed is tried again under the same id, by another execution.
    session.files.write("stock", "")
    again = session.invoke(
        "shop:ship", input=ORDER, invocation_id="ship-17", execution_id="ship-17-again"
    )
    print(again.status, again.result().return_value, len(list(again.executions())))
